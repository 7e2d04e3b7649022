"""Every method on every fleet: what the project promises of all of them.

A newcomer joins by one line in `cases.py`.
"""
