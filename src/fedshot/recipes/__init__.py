"""One file for each published table or figure, and what trains and keeps its cells."""

from fedshot.recipes.recipe import Cell, Recipe, names

__all__ = ["Cell", "Recipe", "names"]
