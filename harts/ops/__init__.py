"""Operators on compact rows: one folder an operator, a plain reference and one dispatch in each."""
