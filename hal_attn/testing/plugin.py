"""The conformance kit under pytest: a class to subclass; the package `hal_attn_pytest` has its code and the options.

```python
from hal_attn.testing.plugin import BackendConformance


class TestMine(BackendConformance):
    backend = "mine"
```

Each check is a test. A refusal that is as it should be passes, and what was not run is skipped with its reason.
"""

from hal_attn_pytest import BackendConformance

__all__ = ["BackendConformance"]
