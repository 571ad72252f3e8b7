#!/bin/bash
# What stages, --tp-size and --exact do on two GPUs of one machine; from the root: OUT=FOLDER bash benchmark/two_gpus.sh [part ...]
# Parts in order: probe text nine ones nano exact gdn layers turns. Without names all of them, each only if its
# seconds still fit into LIMIT (default 500) from the start. "text" needs "probe" in the same call.
: "${OUT:?set OUT}"
L=$OUT/l; mkdir -p "$L"
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD/python:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 TOKENIZERS_PARALLELISM=false
export LIMIT=${LIMIT:-500} L STAGES_DUMP=$(mktemp -u)
W=$(mktemp -d)
cat > "$W/sitecustomize.py" <<'PY'
# On a touch of $STAGES_DUMP each process of ours writes its stacks, and where its messages are.
import os, sys, threading, time
def watch(path):
    last = 0.0
    while True:
        time.sleep(0.5)
        try:
            now = os.stat(path).st_mtime
        except OSError:
            continue
        if now == last:
            continue
        last = now
        import faulthandler, gc
        with open(f"{path}.{os.getpid()}", "a") as file:
            print(sys.argv[:8], file=file, flush=True)
            faulthandler.dump_traceback(file=file, all_threads=True)
            mail = sys.modules.get("mamba_eagle.parallel.mail")
            torch = sys.modules.get("torch")
            if mail is None or torch is None or not hasattr(mail, "PeerMail"):
                continue
            for one in gc.get_objects():
                if type(one) is mail.PeerMail:
                    print("rank", one.rank, "sent", dict(one.sent), "received", dict(one.received), file=file, flush=True)
                    with torch.cuda.stream(torch.cuda.Stream()):
                        flags = one.memory[1].own.view(-1, len(one.rings), 2, mail.PROGRAMS).cpu()
                    print("posted/taken by channel, rank: least", flags.amin(-1).tolist(), "most", flags.amax(-1).tolist(), file=file, flush=True)
if os.environ.get("STAGES_DUMP"):
    threading.Thread(target=watch, args=(os.environ["STAGES_DUMP"],), daemon=True).start()
PY
cat > "$W/drive.py" <<'PY'
import asyncio, contextlib, glob, json, os, re, shutil, signal, subprocess, sys, tempfile, threading, time, traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import httpx
from benchmark.lib.client import StreamClient
from benchmark.lib.server import ServerProcess
from benchmark.lib.served import Scenario, run
BEGAN = time.time()
L, LIMIT = Path(os.environ["L"]), float(os.environ["LIMIT"])
DUMP = os.environ["STAGES_DUMP"]
TRACE = os.environ.get("STAGES_TRACE")
def say(*what):
    line = f"[{time.time() - BEGAN:5.0f} s] " + " ".join(map(str, what))
    print(line, flush=True)
    with open(L / "summary.txt", "a") as file: print(line, file=file)
def dump(why):
    Path(DUMP).touch(); time.sleep(3)
    with open(L / "stacks.txt", "a") as out:
        print("=====", why, file=out)
        for name in sorted(glob.glob(DUMP + ".*")):
            out.write(Path(name).read_text()[-20000:]); os.remove(name)
def log(name, text):
    with open(L / "log.txt", "a") as out: print(f"===== {name}\n{text[-30000:]}", file=out)
class Server(ServerProcess):
    """start_seconds bounded; a hang leaves stacks."""
    def __init__(self, name, flags, gpus, seconds=100):
        self.name = name
        super().__init__(flags.split(), 0, {"CUDA_VISIBLE_DEVICES": gpus}, seconds)
        self.began = time.time()
    def ready(self):
        timer = threading.Timer(self.start_seconds - 8, dump, [f"{self.name} does not start"]); timer.daemon = True; timer.start()
        try:
            self.wait_for_output("Server is ready at")
        finally:
            timer.cancel()
        say(self.name, f"ready after {time.time() - self.began:.1f} s")
        return self
    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try: self.process.wait(10)
            except subprocess.TimeoutExpired:
                say(self.name, "did not end within 10 s"); dump(self.name + " does not end")
                with contextlib.suppress(ProcessLookupError): os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(5)
        self._reader.join(2); log(self.name, self.output)
@contextlib.contextmanager
def serving(name, flags, gpus="0,1", seconds=100):
    server = Server(name, flags, gpus, seconds)
    try:
        yield server.ready()
    except Exception as error:
        say("FAILED", name, repr(error)[:600]); dump(name); raise
    finally:
        server.end()
def ask_all(server, bodies, clients, seconds=40):
    def ask(body):
        reply = httpx.post(server.base_url + "/generate", json=body, timeout=seconds, trust_env=False)
        reply.raise_for_status(); return reply.json()
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(ask, bodies))
DEVICE, FEW = os.environ.get("STAGES_DEVICE", "cuda"), int(os.environ.get("STAGES_FEW", "1"))
EMBEDDED = f"--device {DEVICE} --max-running-requests 32 --max-total-tokens 16000 --disable-radix-cache"
def text_bodies(count=48 // FEW, tokens=80 // FEW, **more):
    from mamba_eagle.eval.prompts import problem_texts
    texts = problem_texts(count)
    return [{"text": text, "sampling_params": {"max_new_tokens": tokens, "temperature": 0.8 if i % 3 == 2 else 0, "seed": i, "ignore_eos": True}, **more} for i, text in enumerate(texts)]
def ids(replies): return [reply["output_ids"] for reply in replies]
def different(a, b): return sum(x != y for x, y in zip(a, b))
STATE = {}
def probe():
    code = '''
import os, sys, torch, time, random
from mamba_eagle.parallel.distributed import ProcessGroup, meet
from mamba_eagle.parallel.groups import Channel
from mamba_eagle.parallel.mail import join_mail, mail_problem
from mamba_eagle.parallel.meeting import FileMeeting
from mamba_eagle.parallel.shard import Shard
rank = int(sys.argv[1]); device = torch.device("cuda", rank)
meet(Shard(rank, 2), device, FileMeeting(sys.argv[2]))
group = ProcessGroup(Shard(rank, 2), device, [range(2)]); group.connect()
print("problem:", repr(mail_problem(group)), flush=True)
began = time.time(); group.mail = join_mail(group, {Channel.HIDDEN: 4 << 20, Channel.TREES: 65536, Channel.TOKENS: 65536})
print("joined after", round(time.time() - began, 2), flush=True)
H, R, K = Channel.HIDDEN, Channel.TREES, Channel.TOKENS
wrong = 0
for i in range(400):  # stage 0 is one plan ahead, and a plan of prompts comes now and then
    n = 3_000_000 if i % 50 == 7 else 1 + 37 * i % 3000
    x = torch.full((n, 8), i, dtype=torch.bfloat16 if i % 2 else torch.float32, device=device)
    if rank == 0:
        group.hand_on(x)
        if i: wrong += (group.from_last(torch.zeros(i % 7 + 1, 8, dtype=torch.int64, device=device), K) != i).sum()
        wrong += (group.from_last(torch.zeros(i % 5 + 3, dtype=torch.uint8, device=device), R) != i % 256).sum()
    else:
        group.from_last(torch.full((i % 5 + 3,), i % 256, dtype=torch.uint8, device=device), R)
        wrong += (group.take(torch.empty_like(x)) != x).sum()
        if i: group.from_last(torch.full((i % 7 + 1, 8), i, dtype=torch.int64, device=device), K)
print("wrong numbers:", int(wrong), flush=True)
for size in (9_000, 2_300_000, 36_000_000):
    x = torch.zeros(size // 8, dtype=torch.int64, device=device)
    for count in (20, 200):
        torch.cuda.synchronize(); began = time.time()
        for _ in range(count):
            if rank == 0: group.hand_on(x); group.from_last(x[:8], K)
            else: group.take(x); group.from_last(x[:8], K)
        torch.cuda.synchronize()
    print(size, "bytes there and 64 back, us:", round(1e6 * (time.time() - began) / count, 1), flush=True)
group.close()
'''
    folder = tempfile.mkdtemp()
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(r), folder + "/ranks"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for r in (0, 1)]
    end = time.time() + 60
    while any(r.poll() is None for r in ranks) and time.time() < end: time.sleep(0.2)
    hung = any(r.poll() is None for r in ranks)
    if hung: dump("probe")
    for r in ranks: r.kill()
    texts = [r.communicate()[0] for r in ranks]
    for text in texts: log("probe", text)
    say("probe", texts[0].replace("\n", " | ")[-700:])
    if hung or "wrong numbers: 0" not in texts[0] or "wrong numbers: 0" not in texts[1]:
        say("probe rank 1", texts[1][-700:]); raise RuntimeError("messages do not work")
def references():
    """One GPU each, beside the probe."""
    flags = f"{EMBEDDED} --dtype float32 --speculative-algorithm NONE"
    def embedded():
        with serving("one gpu f32 plain", flags, "0", 110) as server:
            STATE["expected"] = ids(ask_all(server, text_bodies(), 16))
    def gdn():
        with serving("one gpu gdn f32", gdn_flags(), "1", 110) as server:
            STATE["gdn"] = ids(ask_all(server, gdn_bodies(), 8))
    threads = [threading.Thread(target=quietly, args=(work,)) for work in (embedded, gdn)]
    for thread in threads: thread.start()
    return threads
def quietly(work):
    try: work()
    except Exception: say("FAILED", work.__name__, traceback.format_exc()[-500:])
def gdn_flags():
    folder = Path(tempfile.gettempdir(), "gdn"); folder.mkdir(exist_ok=True)
    config = json.loads(Path("benchmark/models/qwen3.6-27b/config.json").read_text())
    config |= {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2,
               "linear_num_value_heads": 8, "linear_num_key_heads": 4, "vocab_size": 4096, "mtp_num_hidden_layers": 0, "eos_token_id": 1, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return (f"--model-path {folder} --load-format dummy --skip-tokenizer-init --dtype float32 --device {DEVICE} --max-running-requests 8 --max-total-tokens 8000 "
            f"--disable-radix-cache --speculative-algorithm STANDALONE --speculative-draft-model-path {folder} --speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 6")
def gdn_bodies():
    return [{"input_ids": [(i * 37 + k * 11) % 4000 + 5 for k in range(20 + 7 * i)], "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}} for i in range(16)]
def first():
    threads = references()
    try: probe()
    finally:
        for thread in threads: thread.join(130)
def text():
    with serving("pp2 f32 trees", f"{EMBEDDED} --dtype float32 --pp-size 2") as server:
        info = httpx.get(server.base_url + "/server_info", trust_env=False).json()
        alone = ask_all(server, text_bodies(4, 32), 1)
        say("pp2 trees, one request at a time:", different([x[:32] for x in STATE["expected"][:4]], ids(alone)), "of 4 differ; cohorts", re.findall(r'"?cohorts"?\W+(\d+)', json.dumps(info))[:1])
        for round in range(2):
            found = ids(ask_all(server, text_bodies(), 32))
            say("pp2 trees, 32 clients:", different(STATE["expected"], found), "of", len(found), "differ")
        aborted = 0
        with ThreadPoolExecutor(16) as pool:
            def leave(body):
                with contextlib.suppress(Exception): httpx.post(server.base_url + "/generate", json=body, timeout=0.15, trust_env=False)
            list(pool.map(leave, text_bodies(32, 2000)))
        found = ids(ask_all(server, text_bodies(), 32))
        say("after 32 clients that left:", different(STATE["expected"], found), "differ")
        kill_one(server)
    with serving("pp2 f32 plain", f"{EMBEDDED} --dtype float32 --pp-size 2 --speculative-algorithm NONE") as server:
        found = ids(ask_all(server, text_bodies(), 32))
        say("pp2 plain, 32 clients:", different(STATE["expected"], found), "differ")
def kill_one(server):
    pids = server.pids(); replies = []
    def endless(i):
        body = {"text": "Hello", "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}
        try: replies.append(httpx.post(server.base_url + "/generate", json=body, timeout=40, trust_env=False).status_code)
        except Exception as error: replies.append(type(error).__name__)
    threads = [threading.Thread(target=endless, args=(i,)) for i in range(8)]
    for thread in threads: thread.start()
    time.sleep(1.5); began = time.time(); os.kill(pids["runner"], signal.SIGKILL)
    def left(): return [role for role, pid in pids.items() if os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"]
    while left() and time.time() < began + 20: time.sleep(0.05)
    seconds = time.time() - began
    for thread in threads: thread.join(10)
    say(f"kill: all ended after {seconds:.2f} s, left {left()}, replies {replies}")
NINE = ("--model-path benchmark/models/nemotron-nano-9b-v2 --load-format dummy --skip-tokenizer-init --max-running-requests 64 --device cuda "
        "--speculative-algorithm STANDALONE --speculative-draft-model-path benchmark/models/llama-2-layers --speculative-num-steps 5 "
        "--speculative-eagle-topk 3 --speculative-num-draft-tokens 8 --no-speculative-adaptive --simulate-acc-len 3")
def clients(server, name, counts=(1, 64), requests=2):
    async def play():
        async with StreamClient(server.base_url, "", 60.0) as client:
            info = await client.server_info()
            for count, length, output in [(n, 512, 128) for n in counts] + [(64, 16, 256)]:
                for turns in (1, requests):
                    given = Scenario(f"clients-{count}", count, turns, length, output, vocab_size=info["vocab_size"])
                    playing = asyncio.ensure_future(asyncio.wait_for(run(given, client), 60))
                    if TRACE and turns == requests:
                        await asyncio.sleep(0.5); Path(TRACE).write_text(f"{name} {count} {length}"); await asyncio.sleep(1.2); os.remove(TRACE)
                    found = await playing
                say(f"{name}, {count} clients, {length} + {output} tokens: {found.tokens_per_second:.0f} tokens/s, between p50 {found.inter_token_p50:.2f} p99 {found.inter_token_p99:.2f} ms, first {found.first_token_p50:.0f} ms, busy {found.busy_share:.2f}, failed {found.failed}, compiled {found.compiled}")
                with open(L / "results.jsonl", "a") as file: print(json.dumps({"name": "served", "way": name, "clients": count, "input_len": length, "output_len": output, **found._asdict()}), file=file)
    asyncio.run(play())
def bench(name, flags, gpus, seconds):
    command = [sys.executable, "-m", "mamba_eagle.bench_one_batch", *flags.split(), "--results", str(L / "bench.jsonl"), "--run-name", name]
    made = subprocess.Popen(["timeout", "-s", "INT", "-k", "5", str(seconds), *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus})
    out = made.communicate()[0]; log(name, out)
    if made.returncode: say("FAILED", name, made.returncode, out[-400:])
    for line in out.splitlines():
        if re.search(r"[Dd]ecode|step", line) and re.search(r"\d", line): say(name, "|", line[:160])
NANO = f"--model-path benchmark/models/nemotron-3-nano-30b-a3b --load-format dummy --device {DEVICE} --batch-size 1 8 32 --input-len 256 --output-len 48 --max-running-requests 32"
TREE = " --speculative-algorithm STANDALONE --speculative-draft-model-path benchmark/models/llama-2-layers --speculative-num-steps 5 --speculative-eagle-topk 3 --speculative-num-draft-tokens 8 --no-speculative-adaptive --simulate-acc-len 3"
PLAIN = " --speculative-algorithm NONE"
def ones():
    """One GPU's figures: 9B on the first, Nano-30B on the second."""
    def nine():
        with serving("one gpu 9b trees", NINE, "0", 130) as server: clients(server, "one gpu 9b trees")
    def nano():
        bench("nano one gpu plain", NANO + PLAIN, "1", 80); bench("nano one gpu trees", NANO + TREE, "1", 90)
    threads = [threading.Thread(target=quietly, args=(work,)) for work in (nine, nano)]
    for thread in threads: thread.start()
    for thread in threads: thread.join(180)
def nine():
    with serving("pp2 9b trees 34,22", NINE + " --pp-size 2 --pp-layers 34,22", seconds=120) as server: clients(server, "pp2 9b trees 34,22")
def nano():
    bench("nano tp2 plain", NANO + PLAIN + " --tp-size 2", "0,1", 80); bench("nano tp2 trees", NANO + TREE + " --tp-size 2", "0,1", 90)
def exact():
    asks = {"return_logprob": True, "logprob_start_len": 0}
    def told(replies): return [(r["output_ids"], r["meta_info"]["output_token_logprobs"], r["meta_info"]["input_token_logprobs"]) for r in replies]
    flags = f"{EMBEDDED} --dtype bfloat16 --exact --tp-size 2 --check-ranks 1"
    with serving("tp2 exact trees", flags) as server:
        bodies = text_bodies(24, 64, **asks)
        crowd, again, alone = (told(ask_all(server, bodies, n)) for n in (24, 5, 1))
        say("exact tp2 trees: crowd/again", different(crowd, again), "crowd/alone", different(crowd, alone), "of 24 differ (texts and logprobs)")
    with serving("tp2 exact plain", flags + PLAIN) as server:
        plain = told(ask_all(server, bodies, 3))
        say("exact tp2: trees/plain", different(crowd, plain), "of 24 differ; texts alone", different([x[0] for x in crowd], [x[0] for x in plain]))
def gdn():
    if "gdn" not in STATE:
        with serving("one gpu gdn f32", gdn_flags(), "1", 80) as server: STATE["gdn"] = ids(ask_all(server, gdn_bodies(), 8))
    for name, flag in (("tp2", "--tp-size 2"), ("pp2", "--pp-size 2")):
        with serving(f"gdn {name}", f"{gdn_flags()} {flag}", seconds=80) as server:
            say(f"gdn {name}:", different(STATE["gdn"], ids(ask_all(server, gdn_bodies(), 8))), "of 16 texts differ from one GPU's")
def layers():
    with serving("pp2 9b trees equal bytes", NINE + " --pp-size 2", seconds=120) as server: clients(server, "pp2 9b trees equal bytes", (64,))
def turns():
    with serving("pp2 9b trees in turns", NINE + " --pp-size 2 --pp-turns", seconds=120) as server: clients(server, "pp2 9b trees in turns", (1, 64))
def diagnose():
    """After texts that failed: which part it is."""
    for flag in ("--pp-turns", "--disable-cuda-graph"):
        with contextlib.suppress(Exception):
            with serving(f"pp2 f32 trees {flag}", f"{EMBEDDED} --dtype float32 --pp-size 2 {flag}", seconds=70) as server:
                for count in (1, 32):
                    found = ids(ask_all(server, text_bodies(24, 40), count, 25))
                    say(flag, f"{count} clients:", different([x[:40] for x in STATE["expected"]], found), "of 24 differ")
PARTS = {"probe": (first, 75), "text": (text, 75), "nine": (nine, 75), "ones": (ones, 110), "nano": (nano, 90), "exact": (exact, 60), "gdn": (gdn, 55), "layers": (layers, 70), "turns": (turns, 75)}
chosen = sys.argv[1:] or list(PARTS)
for name in chosen:
    work, seconds = PARTS[name]
    if time.time() - BEGAN + seconds > LIMIT: say("left out, no time:", name); continue
    began = time.time()
    try: work()
    except Exception:
        say("FAILED part", name, traceback.format_exc()[-600:])
        if name == "probe": say("fail fast: nothing else is tried"); break
        if name == "text": diagnose()
    say(f"part {name}: {time.time() - began:.0f} s (planned {seconds})")
PY

nvidia-smi --query-gpu=name,memory.total --format=csv,noheader | tee "$L/summary.txt"
PYTHONPATH="$W:$PYTHONPATH" timeout -s INT -k 10 $((LIMIT + 20)) "$PYTHON" "$W/drive.py" "$@" 2>&1 | tail -c 30000
tail -c 9000 "$L/summary.txt"
