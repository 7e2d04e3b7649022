"""One file for each published table or figure, and what trains and keeps its cells."""

from fedshot.recipes.index import load, names
from fedshot.recipes.reading import read
from fedshot.recipes.recipe import Cell, Recipe

__all__ = ["Cell", "Recipe", "load", "names", "read"]
