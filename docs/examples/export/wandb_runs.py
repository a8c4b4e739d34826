"""Each comparison as a run of Weights & Biases: `python -m pytest -p wandb_runs`; WANDB_MODE=offline makes a folder."""

import wandb


def pytest_aorta_comparison(comparison):
    """Send what was measured, and the verdicts."""
    if not comparison.launches:
        return
    commit = comparison.launches[-1].facts.provenance.commit
    config = {"workload": comparison.workload, "platform": comparison.platform, "commit": commit}
    with wandb.init(project="training-tests", name=comparison.case, config=config) as run:
        run.summary.update(comparison.measured)
        run.summary.update({f"verdict/{row.metric}": row.label for row in comparison.rows})
