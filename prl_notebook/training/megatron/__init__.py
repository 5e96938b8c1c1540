"""The tri-model trainer on megatron-core: tensor, pipeline and data parallel on CPU, CUDA and Ascend NPU."""
