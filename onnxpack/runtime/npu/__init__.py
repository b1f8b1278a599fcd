"""The NPU device: claimed products on kernels through pyxrt, everything between them in onnxruntime."""
