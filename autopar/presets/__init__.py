"""Published models, devices and profiles of devices as data, each number with its source, and the reader of models.

May import `autopar.files` and `autopar.errors`; `autopar.ir.device_presets` reads the devices.
"""
