"""Operators of ONNX that TVM's importer lacks: their definitions, and what takes their place."""
