"""placeholder"""
from __future__ import annotations
import torch
from hal_attn.backend import AttentionBackend
from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.request import AttentionRequest


class AscendPlatform(Platform):
    name = "ascend"
    device_type = "npu"
    process_group_backend = "hccl"

    def detect(self) -> Detection:
        return Detection(False, "not here yet", "")

    def devices(self) -> tuple[DeviceInfo, ...]:
        return ()

    def backends(self) -> tuple[AttentionBackend, ...]:
        return ()

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        return ()
