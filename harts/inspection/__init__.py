"""What one would want to see before believing a plan: facts, tables, pictures, one HTML page.

`facts` and `tables` need NumPy only; the pictures need matplotlib and are imported when asked for.
"""
