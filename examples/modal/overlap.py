"""The GPU lane on Modal: `modal run examples/modal/overlap.py`, from the root of the repository."""

import subprocess

import modal

image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("git")
    .pip_install_from_requirements("requirements.txt")
    .add_local_dir(".", "/workspace", ignore=[".venv"])
)
app = modal.App("aorta", image=image)


# The exclamation mark: Modal may otherwise give an H200 for an H100, which has no baseline, and fail.
@app.function(gpu="H100!:2", timeout=3600)
def overlap() -> int:
    """Run the tests, and return the exit code of pytest."""
    words = "python -m pytest -m overlap --aorta-gpus=2 --aorta-without-gpus=fail --aorta-fail-on=missing"
    return subprocess.run(words.split(), cwd="/workspace", check=False).returncode


@app.local_entrypoint()
def main() -> None:
    """Exit with the code of pytest."""
    raise SystemExit(overlap.remote())
