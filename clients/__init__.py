"""The clients people use, run against the server. Not installed with the product."""
