"""Lossy methods of others, and the data on which all are compared; a file for each library."""
