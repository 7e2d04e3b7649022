"""Recipes: published tables and figures as data, and the code that trains and keeps their cells."""

from fedshot.recipes.index import load, names
from fedshot.recipes.reading import read
from fedshot.recipes.recipe import Cell, Recipe

__all__ = ["Cell", "Recipe", "load", "names", "read"]
