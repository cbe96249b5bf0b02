"""The model: the transformers cache, its layers, the registered attention function, the teacher-forced replay."""
