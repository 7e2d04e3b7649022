"""Recipes: published tables and figures as YAML, and the code that trains their cells.

A cell is one number of a table: one row (a method) in one column (a setting).
"""
