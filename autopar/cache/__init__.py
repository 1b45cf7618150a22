"""Files that autopar keeps for the next time: captures, labels and searches, under one policy (`store`).

Imports the packages whose content it keeps.
"""
