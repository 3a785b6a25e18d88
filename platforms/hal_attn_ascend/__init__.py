"""Huawei Ascend: finds its devices and library versions. It has no attention backend yet."""
