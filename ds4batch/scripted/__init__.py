"""A model without weights, which says what a file tells it to: for demonstrations, and for tests of clients over real sockets."""
