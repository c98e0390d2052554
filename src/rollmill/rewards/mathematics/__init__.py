"""Finding a mathematical answer in text and telling whether two answers are equal.

`extract` finds the answer, `clean` brings it to one notation, `numbers` and `units` compare
quantities exactly, `structure` takes lists, sets, tuples, intervals and matrices apart, `symbolic`
asks the library (math-verify's parser and comparison) about expressions, and `equal` decides.
Numbers are never compared through binary floats.
"""
