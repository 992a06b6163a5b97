from numflow.cli import main

main()
