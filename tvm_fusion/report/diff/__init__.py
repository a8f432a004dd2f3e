"""What differs between two plans or reports: of two versions of a model, on two devices, before and
after tuning.

    files -> sides -> the operators of one matched with those of the other -> changes -> text | JSON
"""
