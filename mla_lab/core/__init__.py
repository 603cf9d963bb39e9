"""One decode call as numbers: problem, token formats, masks, cards, models, errors, files."""
