"""A machine in NumPy that runs PTX and says what is wrong with it; README.md beside this file tells how to use it."""
