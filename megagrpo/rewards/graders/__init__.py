"""The graders of the package."""
