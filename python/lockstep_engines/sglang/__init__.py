"""SGLang's scheduler, without a model and a device."""
