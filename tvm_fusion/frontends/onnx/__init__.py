"""ONNX models to Relax: what reads them, and what takes the place of operators that TVM lacks."""
