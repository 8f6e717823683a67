"""`ds4batch chat`: a conversation with a running server from a terminal. Speaks HTTP only; knows no model and no engine."""
