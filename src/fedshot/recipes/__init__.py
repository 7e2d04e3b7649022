"""Recipes: published tables and figures as YAML, and the code that trains their cells.

A cell is one number of a table: one row (a method) in one column (a setting).
"""

from fedshot.recipes.index import load, names
from fedshot.recipes.reading import read
from fedshot.recipes.recipe import Cell, Recipe

__all__ = ["Cell", "Recipe", "load", "names", "read"]
