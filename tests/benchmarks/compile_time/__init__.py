"""How long compiling takes: whole models through `torch.compile`, by us and by inductor, each in a
process of its own with empty caches, and again with what the first one left there.
"""
