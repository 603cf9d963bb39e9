"""What has been proved on a card, and the cases that prove it.

pairwise    choices such that every allowed pair of levels occurs
cases       the levels of a decode call, and a case's inputs
check       one case against the float64 oracle, under poisoned caches
published   the 396 configurations of a public pull request
costs       time with a feature beside time without, on the same caches
touch       small calls that touch each feature, for a sanitizer
record      runs of these as JSON lines
tables      a README's tables from those records
"""
