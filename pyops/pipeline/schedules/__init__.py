"""A pipeline schedule as data: which actions each rank runs, in which order, proven before it runs.

| file | what it does |
|---|---|
| action.py, orders.py, schedule.py | one action; the values that go from action to action; Schedule
|
| validate.py | what a schedule must be: complete, in order, free of deadlock |
| families.py, asynchronous.py, names.py | the schedules of the literature, by name |
| simulate.py, draw.py | a schedule in time; its picture, text and trace |
"""
