"""The period loop and what it is made of; imports neither torch nor Jupyter."""
