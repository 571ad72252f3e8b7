"""Who gets which hit, and where state slots are placed."""

from __future__ import annotations

import re

import pytest
from fake_runner import FakeRunner, Server, embedding_of, expected_text

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import PLAIN, Failure, SamplingParams
from mamba_eagle.message import Plan

SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)
TRUNK = [(i * i + i // 7) % 50 for i in range(1000)]


def server(pools: tuple[int, int, int] = (20000, 60, 8), context: int = 3000, **settings) -> Server:
    settings.setdefault("speculative_algorithm", "NONE")
    return Server(EngineConfig(**settings), FakeRunner(*pools, context))


def saves(plans: list[Plan]) -> list[int]:
    return [save.position for plan in plans for item in plan.prefill for save in item.saves]


def record(serving: Server) -> list[Plan]:
    plans: list[Plan] = []
    execute = serving.runner.execute
    serving.runner.execute = lambda plan: plans.append(plan) or execute(plan)
    return plans


@pytest.mark.parametrize("chunk", [128, 1024, 8192])
@pytest.mark.parametrize("overlap", [True, False])
def test_concurrent_requests_share_a_long_prefix(chunk, overlap):
    """All but the first report it as cached."""
    serving = server(chunked_prefill_size=chunk, disable_overlap_schedule=not overlap)
    tails = [[i, i + 1, i + 2, *range(10)] for i in range(5)]
    for i, tail in enumerate(tails):
        serving.add(f"r{i}", TRUNK + tail, SHORT)
    serving.finish()
    assert [serving.last[f"r{i}"].cached_tokens for i in range(5)] == [0, *[1000] * 4]
    assert serving.runner.prefilled_tokens == 1013 + 4 * 13
    for i, tail in enumerate(tails):
        assert serving.texts[f"r{i}"] == expected_text(TRUNK + tail, SHORT)


def test_identical_prompts_run_once():
    serving = server()
    for i in range(4):
        serving.add(f"r{i}", TRUNK, SHORT)
    serving.finish()
    assert [serving.last[f"r{i}"].cached_tokens for i in range(4)] == [0, 999, 999, 999]


def test_requests_that_share_little_are_run_together():
    serving = server()
    plans = record(serving)
    for i in range(4):
        serving.add(f"r{i}", TRUNK[:20] + [i] * 20, SHORT)
    serving.finish()
    assert len(plans[0].prefill) == 4


def test_a_request_that_arrives_during_a_long_prefill_waits_for_its_prefix():
    serving = server(chunked_prefill_size=100)
    serving.add("first", TRUNK, SHORT)
    serving.step()
    serving.add("second", TRUNK[:900] + [1, 2, 3], SHORT)
    serving.add("other", [5] * 30, SHORT)
    serving.finish()
    assert serving.last["second"].cached_tokens == 900
    assert serving.last["other"].cached_tokens == 0


def test_multi_turn_chat_hits_the_end_of_the_last_output():
    serving = server()
    chat, end = TRUNK[:100], 0
    for turn in range(4):
        serving.add(f"turn{turn}", chat, SHORT)
        serving.finish()
        assert serving.last[f"turn{turn}"].cached_tokens == end
        chat = chat + serving.texts[f"turn{turn}"]
        end = len(chat) - 1  # the last token was not run
        chat = chat + [turn] * 10


@pytest.mark.parametrize("overlap", [True, False])
def test_a_follow_up_sent_at_once_hits_the_output_of_the_request_that_is_just_ending(overlap):
    """It arrives with the last output, while a plan in flight still has the request."""
    serving = server(disable_overlap_schedule=not overlap)
    chat, end, in_flight = TRUNK[:100], 0, 0
    for turn in range(6):
        sampling = SamplingParams(max_new_tokens=300, min_new_tokens=40, seed=turn)
        serving.add(f"turn{turn}", chat, sampling)
        while (last := serving.last.get(f"turn{turn}")) is None or last.finish is None:
            serving.step()
        assert last.finish.kind == "stop" and last.cached_tokens == end
        assert serving.texts[f"turn{turn}"] == expected_text(chat, sampling)
        in_flight += not serving.scheduler.idle
        chat = chat + serving.texts[f"turn{turn}"]
        end = len(chat) - 1
        chat = chat + [turn] * 10
    serving.finish()
    assert in_flight > 0


def test_an_aborted_request_is_not_waited_for():
    serving = server()
    serving.add("a", TRUNK[:100], SamplingParams(max_new_tokens=300, ignore_eos=True))
    while len(serving.texts.get("a", [])) < 50:
        serving.step()
    serving.take(serving.scheduler.abort("a"))
    assert not serving.scheduler.idle
    serving.add("b", TRUNK[:100] + serving.texts["a"] + [1], SHORT)
    serving.step()
    assert not serving.scheduler.prefill.waiting
    serving.finish()
    assert serving.last["b"].cached_tokens == 99


def test_with_one_state_slot_a_conversation_goes_on_in_it():
    """The cache gives the state up to the request that hits it."""
    serving = server(pools=(2000, 1, 1))
    chat = TRUNK[:100]
    for turn in range(4):
        serving.add(f"{turn}", chat, SHORT)
        serving.finish()
        assert serving.texts[f"{turn}"] == expected_text(chat, SHORT)
        assert serving.last[f"{turn}"].cached_tokens == (len(chat) - 4 if turn else 0)
        chat = [*chat, *serving.texts[f"{turn}"], turn, 49, 48]


def test_with_one_state_slot_a_retracted_request_does_not_prefill_for_every_token():
    """Its own state can't be kept, so the KV that is cached of it would only get duplicates."""
    serving = tree_server(130, max_states=1, speculative_adaptive=False)
    for i in range(3):
        sampling = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=i)
        serving.add(f"r{i}", TRUNK[:40], sampling)
        serving.finish()
        assert serving.texts[f"r{i}"] == expected_text(TRUNK[:40], sampling)
    assert serving.scheduler.state()["num_retracted_reqs"] > 0
    assert serving.runner.prefilled_tokens <= 3 * 40 + 2 * 100


def test_a_branch_point_is_saved_and_costs_not_the_tail():
    serving = server(pools=(20000, 8, 2), mamba_checkpoint_interval=0)
    plans = record(serving)
    serving.add("a", TRUNK, SHORT)
    serving.finish()
    serving.add("b", TRUNK[:500] + [1, 2, 3], SHORT)  # leaves a's prompt
    serving.finish()
    assert saves(plans) == [999, 500, 502]
    serving.add("c", TRUNK[:500] + [4, 5, 6], SHORT)
    serving.add("b again", TRUNK[:500] + [1, 2, 3], SHORT)
    serving.finish()
    assert serving.last["c"].cached_tokens == 500
    assert serving.last["b again"].cached_tokens == 502


def test_the_tail_is_saved_when_there_is_one_state_to_spare():
    serving = server(pools=(20000, 2, 2), mamba_checkpoint_interval=64)
    plans = record(serving)
    sampling = SamplingParams(max_new_tokens=1)
    serving.add("a", TRUNK, sampling)
    serving.finish()
    serving.add("b", TRUNK[:500] + [1, 2, 3], sampling)
    serving.finish()
    assert saves(plans) == [999, 502]


def test_states_between_come_from_free_slots_only():
    serving = server(mamba_checkpoint_interval=64)
    plans = record(serving)
    serving.add("a", TRUNK, SHORT)
    serving.finish()
    assert saves(plans) == [*range(64, 1000, 64), 999]
    assert serving.scheduler.state()["num_cached_checkpoints"] == 17
    serving.add("shorter", TRUNK[:700], SHORT)
    serving.finish()
    assert serving.last["shorter"].cached_tokens == 640


def test_states_between_are_spread_over_a_long_prompt():
    serving = server(mamba_checkpoint_interval=16)
    plans = record(serving)
    serving.add("a", TRUNK, SHORT)
    serving.finish()
    assert saves(plans) == [*range(32, 1000, 32), 999]


def test_logprobs_of_the_prompt_limit_the_hit():
    serving = server()
    serving.add("a", TRUNK, SHORT)
    serving.finish()
    for start, cached in ((999, 960), (500, 448), (449, 448), (1, 0), (0, 0)):
        rid = f"from{start}"
        serving.add(rid, TRUNK, SHORT, return_logprob=True, logprob_start=start)
        serving.finish()
        assert serving.last[rid].cached_tokens == cached
        assert len(serving.input_logprobs[rid]) == 1000 - start


def test_a_mean_runs_the_whole_prompt_and_a_last_token_continues_from_the_cache():
    """Also after it was retracted, and only for the prompt as it came."""
    none = SamplingParams(max_new_tokens=0)
    serving = server(pools=(3000, 60, 8), chunked_prefill_size=300)
    serving.add("plain", TRUNK, SHORT)
    serving.finish()
    for rid, sampling, pooling, cached, retracted in (
        ("last", none, "last", 999, 0),  # done in one step
        ("mean", none, "mean", 0, 1),
        ("also text", SHORT, "mean", 0, 1),
    ):
        serving.add(rid, TRUNK, sampling, pooling=pooling)
        serving.step()
        for request in list(serving.scheduler._admitted):
            serving.scheduler._retract(request)
        serving.finish()
        last = serving.last[rid]
        assert (last.cached_tokens, last.retractions) == (cached, retracted)
        assert serving.embeddings.pop(rid) == embedding_of(TRUNK)
    assert serving.texts["also text"] == expected_text(TRUNK, SHORT) and not serving.embeddings


def test_nothing_is_reused_or_saved_without_the_cache():
    serving = server(disable_radix_cache=True)
    plans = record(serving)
    for i in range(3):
        serving.add(f"r{i}", TRUNK[:100], SHORT)
    serving.finish()
    assert len(plans[0].prefill) == 3 and saves(plans) == []
    assert all(release.fold_to == -1 for plan in plans for release in plan.releases)
    assert serving.scheduler.state()["cached_tokens_total"] == 0


def test_longest_prefix_first():
    serving = server(schedule_policy="lpm", pools=(20000, 60, 1))
    serving.add("seed", TRUNK[:200], SHORT)
    serving.finish()
    serving.add("stranger", [3] * 50, SHORT)
    serving.add("friend", TRUNK[:200] + [1], SHORT)
    serving.step()
    assert [request.rid for request in serving.scheduler.prefill.waiting] == ["stranger"]
    serving.finish()


def test_first_come_first_served_without_overtaking():
    serving = server(pools=(300, 10, 8))
    plans = record(serving)
    long = SamplingParams(max_new_tokens=40, ignore_eos=True)
    serving.add("big1", TRUNK[:200], long)
    serving.step()
    serving.add("big2", TRUNK[300:500], long)  # does not fit beside the first
    serving.add("small", [1, 2, 3], SHORT)
    serving.finish()
    assert [item.first.output_start for plan in plans for item in plan.prefill] == [200, 200, 3]


def test_what_can_never_fit_is_refused_at_once():
    serving = server(pools=(1000, 10, 8))
    serving.add("r", [1] * 400, SamplingParams(max_new_tokens=2000))
    finish = serving.last["r"].finish
    assert finish.kind == "abort" and finish.failure is Failure.REFUSED
    expect = "400 prompt tokens, 2000 new tokens .* but there are 1000"
    assert re.search(expect, finish.message), finish.message
    assert serving.scheduler.idle


def test_output_is_clipped_to_the_context():
    serving = server(context=100)
    serving.add("r", [1] * 90, SamplingParams(max_new_tokens=1000, ignore_eos=True))
    serving.finish()
    assert serving.last["r"].finish.as_dict() == {"type": "length", "length": 10}


def test_flush_forgets_and_is_refused_while_busy():
    serving = server()
    serving.add("a", TRUNK, SHORT)
    serving.step()
    with pytest.raises(RuntimeError, match="only while no request holds slots"):
        serving.scheduler.flush()
    serving.finish()
    serving.scheduler.flush()
    serving.scheduler.check_integrity()
    assert serving.scheduler.state()["num_cached_tokens"] == 0
    serving.add("b", TRUNK, SHORT)
    serving.finish()
    assert serving.last["b"].cached_tokens == 0


def test_at_most_two_plans_are_in_flight():
    for overlap, most in ((True, 2), (False, 1)):
        serving = server(disable_overlap_schedule=not overlap)
        serving.add("a", TRUNK[:10], SamplingParams(max_new_tokens=30, ignore_eos=True))
        plans = 0
        while serving.scheduler.plan() is not None:
            plans += 1
        assert plans == most


def test_no_step_is_planned_for_a_request_that_is_certain_to_end():
    serving = server()
    plans = record(serving)
    serving.add("a", TRUNK[:10], SHORT)
    serving.finish()
    assert sum(plan.decode is not None for plan in plans) == SHORT.max_new_tokens - 1


def tree_server(kv_slots: int, max_states: int = 60, **settings) -> Server:
    tree = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "head", **settings}
    return server((kv_slots, max_states, 8), context=400, **tree)


def test_steps_of_all_shapes_are_counted():
    """spec_verify_ct counts plain steps too; drafts are counted by the step's own shape."""
    serving = tree_server(2000)
    plans = record(serving)
    for i in range(8):
        serving.add(f"r{i}", TRUNK[i : i + 20], SamplingParams(max_new_tokens=150, ignore_eos=True))
    serving.finish()
    shapes = [plan.decode.shape for plan in plans if plan.decode for _ in plan.decode.slots]
    assert len(set(shapes)) >= 3 and PLAIN in shapes
    last = serving.last.values()
    state = serving.scheduler.state()
    assert sum(output.verify_steps for output in last) == state["verify_steps_total"]
    # steps of requests that had ended in the step before are in plans alone
    assert state["verify_steps_total"] <= len(shapes)
    assert sum(output.accepted_drafts + output.verify_steps + 1 for output in last) == 8 * 150
    assert sum(output.proposed_drafts for output in last) <= sum(shape.depth for shape in shapes)
    speculation = serving.scheduler.policy.state()
    assert speculation.adaptive
    steps = {name: use.steps for name, use in speculation.shapes.items()}
    assert steps == dict(serving.runner.decode_steps)


def test_state_counts():
    serving = server()
    serving.add("a", TRUNK, SHORT)
    serving.finish()
    serving.add("b", TRUNK, SHORT)
    serving.finish()
    state = serving.scheduler.state()
    assert state["num_requests_total"] == 2 and state["generation_tokens_total"] == 8
    assert state["prompt_tokens_total"] == 2000 and state["cached_tokens_total"] == 999
    assert state["cache_hit_rate"] == pytest.approx(0.4995)
    assert state["spec_accept_length"] == 1.0 and state["verify_steps_total"] == 6
    assert state["num_used_tokens"] == state["num_running_reqs"] == state["num_queue_reqs"] == 0


def test_requests_of_different_salts_share_nothing():
    serving = server()
    plans = record(serving)
    for rid, salt in (("a", "x"), ("b", "y"), ("c", ""), ("d", "x"), ("e", "y"), ("f", "")):
        serving.add(rid, TRUNK, SHORT, salt=salt)
        serving.finish()
    assert [serving.last[rid].cached_tokens for rid in "abcdef"] == [0, 0, 0, 999, 999, 999]
    firsts = [item.first for plan in plans for item in plan.prefill if item.first]
    assert [first.salted for first in firsts] == [True, True, False, True, True, False]


def test_requests_of_different_salts_do_not_wait_for_each_other():
    serving = server(chunked_prefill_size=100)
    for rid, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        serving.add(rid, TRUNK, SHORT, salt=salt)
    serving.finish()
    assert [serving.last[rid].cached_tokens for rid in "abc"] == [0, 0, 999]
    assert all(serving.texts[rid] == expected_text(TRUNK, SHORT) for rid in "abc")


def test_states_are_saved_where_a_client_asks_for_them():
    serving = server(mamba_checkpoint_interval=0)
    plans = record(serving)
    serving.add("a", TRUNK, SHORT, checkpoints=[333, 700])
    serving.finish()
    assert saves(plans) == [333, 700, 999]
    serving.add("b", [*TRUNK[:500], 49, 48], SHORT)
    serving.finish()
    assert serving.last["b"].cached_tokens == 333
    assert serving.scheduler.cache_use().hits["asked"] == 1


def test_a_pinned_prompt_survives_a_flood_of_others():
    def cached_after_the_flood(pin_seconds: float) -> int:
        serving = server(pools=(2500, 8, 2), mamba_checkpoint_interval=0)
        serving.add("mine", TRUNK, SHORT, pin_seconds=pin_seconds)
        serving.finish()
        assert serving.scheduler.state()["num_pinned_tokens"] == 999 * (pin_seconds > 0)
        for i in range(12):
            serving.add(f"r{i}", [i, *range(40), *TRUNK[:600]], SHORT)
            serving.finish()
        serving.add("again", TRUNK, SHORT)
        serving.finish()
        return serving.last["again"].cached_tokens

    assert cached_after_the_flood(3600) == 999
    assert cached_after_the_flood(0) == 0


def test_what_waiting_requests_need_is_evicted_last():
    """By age it would go first, and of it what is needed next."""
    serving = server(pools=(700, 60, 1))
    first, second, third = ([i, *TRUNK[:190]] for i in (1, 2, 3))
    for i, prompt in enumerate((first, second, third)):
        serving.add(f"old{i}", prompt, SHORT)
        serving.finish()
    for rid, prompt in (("new", TRUNK[:250]), ("first", first), ("second", second)):
        serving.add(rid, prompt, SHORT)
    serving.finish()
    assert serving.last["first"].cached_tokens == serving.last["second"].cached_tokens == 190
