"""The most that one request may ask for; docs/limits.md explains each.

Every limit is checked before the work that it bounds is done, and an error names the field, its
size, the limit and what to do. What depends on the model or on a setting (context length,
vocabulary, ``--max-body-size``, ``--max-queued-requests``) is checked beside these.
"""

# ── values: what float32, the kernels and the protocol hold ──────────────────────────────────

MAX_TEMPERATURE = 10_000.0
GREEDY_BELOW = 1e-6  # lower temperatures mean 0, as with SGLang
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 2.0
MAX_PENALTY = 2.0  # frequency and presence, either sign
MAX_LOGIT_BIAS = 10_000.0  # either sign
MAX_TOP_LOGPROBS = 64
MAX_TIMEOUT = 86_400.0  # seconds that a request may ask for
MAX_PRIORITY = 2**31 - 1  # either sign
MAX_INTEGER = 2**63 - 1  # messages carry 64 bits

# ── sizes of a body ──────────────────────────────────────────────────────────────────────────

MAX_BODY_SIZE = 1024  # MiB, that --max-body-size may allow
MAX_CONTROL_BODY = 65_536  # bytes; routes that take no prompt, such as /abort_request
MAX_DRAINED_BODY = 2**28  # bytes of an oversized body that are read and thrown away
MAX_BODY_PIECES = 16_384  # chunks or packets, besides one for each MIN_BODY_PIECE bytes
MIN_BODY_PIECE = 256
MIN_READ = 16_384  # bytes that a client must take in the time of --write-timeout
MAX_BODIES_IN_MEMORY = 2**26  # bytes of all bodies that are being received or read together
MAX_JSON_CONTAINERS = 32_768  # arrays and objects in a body
MAX_JSON_DEPTH = 256  # of arrays and objects within each other
MAX_JSON_STRINGS = 65_536  # keys included
MAX_JSON_ITEMS = 2**21  # of all arrays and objects: about as many token ids
MAX_JSON_NUMBERS = 32_768  # outside lists of token ids

# ── what a request may list ──────────────────────────────────────────────────────────────────

MAX_PROMPTS = 4096  # also lists of /detokenize and texts of /tokenize
MAX_EMBEDDINGS = 2048  # inputs of /v1/embeddings, as OpenAI's
MAX_MESSAGES = 4096
MAX_KEPT_RESPONSES = 4096  # of all keys together
MAX_KEPT_BYTES = 2**27  # of their JSON, conversations included
MAX_FILES = 1024  # of /v1/files, of each API key
MAX_FILE_BYTES = 2**27  # of one
MAX_FILES_BYTES = 2**30  # of all of a key, with replies of batches
MAX_BATCHES = 256  # of /v1/batches, of each API key
MAX_BATCH_LINES = 50_000
MAX_BATCH_LINE = 2**23  # bytes
MAX_PAGE = 1000  # items of a list of files or batches
MAX_SAMPLES = 1024  # n
MAX_ADAPTERS = 1000  # loaded at the same time
MAX_CACHE_SALT = 256  # characters of cache_salt
MAX_PIN_SECONDS = 3600  # pin_seconds
MAX_SESSIONS = 1024  # open at the same time
MAX_PROFILED_STEPS = 200  # num_steps of /start_profile
MAX_CHECKPOINTS = 16  # positions of checkpoint
MAX_TOOLS = 128
MAX_TOOL_NAME = 128  # characters
MAX_DOCUMENTS = 256
MAX_STOP_STRINGS = 512
MAX_STOP_LENGTH = 1024  # characters of one
MAX_STOP_CHARACTERS = 16_384  # of all together
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS_ENTRIES = 4096
MAX_GRAMMAR_CHARACTERS = 131_072  # of a schema, a pattern or a grammar
MAX_GRAMMAR_SECONDS = 1.5  # of processor time for trying a grammar
MAX_GRAMMAR_MEMORY = 128  # MiB, for the same
MAX_GRAMMAR_WAIT = 60.0  # seconds until it was tried
MAX_GRAMMAR_ITEMS = 3000  # alternatives and optional parts that a text may go on with at one place
MAX_LEXER_STATES = 30_000  # of the automaton of a grammar's patterns
MAX_SCHEMA_DEPTH = 100  # objects and lists within each other
MAX_CHOICES = 4096
MAX_TAGS = 512  # tags, triggers or elements of one structural tag
MAX_TAG_DEPTH = 16  # formats within each other
MAX_RID_LENGTH = 256  # characters
MAX_MODEL_LENGTH = 512  # characters
MAX_DETOKENIZED_IDS = 2**20  # of all lists of /detokenize together

# ── products: a small body may ask for much ──────────────────────────────────────────────────

MAX_PROMPT_TOKENS = 2**22  # of all samples: each carries its prompt
MAX_TOKEN_ENTRIES = 2**18  # logit_bias and stop_token_ids, of all samples
MAX_HIDDEN_STATES = 4096  # of all samples, one per token of output
MAX_TRACED_TOKENS = 2**17  # of all samples: tokens of output with return_spec_trace
MAX_INPUT_LOGPROBS = 2**17  # of one prompt: positions times (1 + top)
MAX_LOGPROBS = 2**21  # of all samples, input and output: tokens times (1 + top)

MAX_TEMPLATE_SECONDS = 2.0  # of processor time for rendering a chat
MAX_THINKING_BUDGET = 2**20  # tokens

# ── what is shown and repeated ───────────────────────────────────────────────────────────────

MAX_SHOWN = 200  # characters of a value in an error message or a log line
MAX_LOGGED_PROMPT = 2000  # characters of a prompt in the log, with --log-prompts
