"""Each comparison as a run of MLflow: `python -m pytest -p mlflow_runs`; MLFLOW_TRACKING_URI names the server."""

import mlflow


def pytest_aorta_comparison(comparison):
    """Log what was measured, and the verdicts as tags."""
    if not comparison.launches:
        return
    commit = comparison.launches[-1].facts.provenance.commit
    tags = {"workload": comparison.workload, "platform": comparison.platform, "commit": commit or "unknown"}
    with mlflow.start_run(run_name=comparison.case, tags=tags):
        values = comparison.measured.items()
        mlflow.log_metrics({name: value for name, value in values if not isinstance(value, str)})
        mlflow.set_tags({f"verdict.{row.metric}": row.label for row in comparison.rows})
