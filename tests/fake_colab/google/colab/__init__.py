"""What a notebook finds of `google.colab` on Colab, as far as the kit asks for it.

    JupyterLab(folder, environment=fake_colab.environment(folder, {"HF_TOKEN": "hf_..."}))    # tests/browser.py

`google` is a namespace package, here as there; a folder on PYTHONPATH adds this part of it.
"""

from google.colab import userdata

__all__ = ["userdata"]
