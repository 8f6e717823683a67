"""Hostile requests against the server's own description: what is sent, what counts as a failure, and how each is sent again.

case.py says what a request is, client.py sends it, oracle.py judges the answer, watch.py the server around it; cases_*.py and
openapi_cases.py make requests, mix.py chooses among them, __main__.py runs them.
"""
