"""The pack: a directory with a manifest, a plain ONNX graph, its weights and its kernels."""
