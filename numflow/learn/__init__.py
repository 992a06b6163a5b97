"""The course: labs whose blank functions the engine then runs, and what checks them (docs/teaching/)."""
