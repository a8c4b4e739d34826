"""Tests over several nodes, with faked launches."""

NODES = ("--aorta-nnodes=2", "--aorta-results=shared", *("-o", "aorta_node_launcher=srun --nodes={nodes}"))
OVER_NODES = "@pytest.mark.world(size=4, nodes=2)"


def test_result_over_nodes_has_its_own_platform(project):
    project.one_test("assert workload.run('toy').platform == 'cpu-x4-n2-gloo'", OVER_NODES)
    project.run(*NODES, shows="aorta: no GPU (CPU ranks) on each of 2 nodes, *", passed=1)


def test_missing_nodes_skip_the_test_or_fail_it(project):
    project.one_test("pass", OVER_NODES)
    project.run("-rs", shows="*needs 2 nodes, 1 given (--aorta-nnodes=1)", skipped=1)


def test_reference_version_over_nodes_is_refused(versioned):
    body = "workload.again(workload.run('toy'), reference=True)"
    versioned.one_test(body, OVER_NODES)
    shows = ["*SpecError: HEAD: this side exists on this node only; use nodes=1"]
    versioned.run(*NODES, "--aorta-ab=HEAD", shows=shows, failed=1)
