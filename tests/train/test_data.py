"""The corpus: the same text however it is packed, held-out files that stay held out, a reproducible tokenizer."""

import tarfile
import zipfile

import pytest

from inkling_jax.tokenizer import Tokenizer
from inkling_jax.train.data import END_TOKEN, CorpusError, join, read_corpus, tokenize, train_tokenizer

FILES = {
    **{f"pkg/module_{i:03}.py": f"def f{i}(x):\n    return x + {i}  # é\n" for i in range(200)},
    "pkg/test/test_a.py": "import unittest\n",
}
LEFT_OUT = {
    "pkg/notes.txt": "not Python",
    "pkg/copy.py": FILES["pkg/module_000.py"],
    "pkg/empty.py": "",
    "encodings/table.py": "decoding_table = ()\n",
    "site-packages/other/code.py": "somebody = 'else'\n",
    "_sysconfigdata__linux.py": "here = 'only'\n",
    "config-3.12/python-config.py": "here = 'too'\n",
}


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "Lib"
    for path, text in (FILES | LEFT_OUT).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    (root / "latin.py").write_bytes(b"x = '\xe9'\n")
    return root


def test_the_corpus_is_the_same_text_in_a_folder_a_tar_and_a_zip(folder, tmp_path):
    with tarfile.open(tmp_path / "src.tar.xz", "w:xz") as archive:
        archive.add(folder, "Python-9.9/Lib")
        archive.add(folder / "pkg/module_000.py", "Python-9.9/Tools/other.py")
    with zipfile.ZipFile(tmp_path / "src.zip", "w") as archive:
        for path in sorted(folder.rglob("*.py"), reverse=True):
            archive.write(path, path.relative_to(folder))
    read = [read_corpus(source) for source in (folder, tmp_path / "src.tar.xz", tmp_path / "src.zip")]
    # Of two equal files the first by path stays.
    expected = {path: text for path, text in FILES.items() if path != "pkg/module_000.py"}
    assert read[0].files == expected | {"pkg/copy.py": FILES["pkg/module_000.py"]}
    assert list(read[0].files) == sorted(read[0].files)
    assert read[0].files == read[1].files == read[2].files
    assert len({corpus.sha256 for corpus in read}) == 1


def test_the_digest_depends_on_paths_and_texts(folder):
    before = read_corpus(folder).sha256
    (folder / "pkg/module_001.py").rename(folder / "pkg/renamed.py")
    renamed = read_corpus(folder).sha256
    (folder / "pkg/renamed.py").write_text("changed = True\n")
    assert len({before, renamed, read_corpus(folder).sha256}) == 3


def test_test_suites_can_be_left_out(folder):
    assert "pkg/test/test_a.py" in read_corpus(folder).files
    assert "pkg/test/test_a.py" not in read_corpus(folder, tests=False).files


def test_a_held_out_file_stays_held_out_when_others_come_and_go(folder):
    learn, held = read_corpus(folder).split()
    assert 1 < len(held) < 20
    assert learn.keys().isdisjoint(held)
    assert learn | held == dict(read_corpus(folder).files)
    for path in list(learn)[::2]:
        (folder / path).unlink()
    assert read_corpus(folder).split()[1] == held


def test_the_running_interpreter_has_a_corpus():
    corpus = read_corpus(tests=False)
    assert "Python 3." in corpus.name
    assert "json/decoder.py" in corpus.files
    assert not any("site-packages" in path for path in corpus.files)


def test_bad_corpora_are_named(tmp_path):
    with pytest.raises(CorpusError, match=r"missing: no such corpus"):
        read_corpus(tmp_path / "missing")
    with pytest.raises(CorpusError, match=r"no \.py files"):
        read_corpus(tmp_path)
    (tmp_path / "only.py").write_text("x = 1\n")
    with pytest.raises(CorpusError, match="neither a folder nor"):
        read_corpus(tmp_path / "only.py")
    with pytest.raises(CorpusError, match="too few"):
        read_corpus(tmp_path).split()


def test_tokenizer_is_reproducible_lossless_and_ends_with_the_end_token():
    made = [train_tokenizer(FILES, 300) for _ in range(2)]
    assert made[0].to_str() == made[1].to_str()
    assert made[0].token_to_id(END_TOKEN) == made[0].get_vocab_size() - 1 <= 299
    ids = tokenize(made[0], FILES)
    assert {path: Tokenizer(made[0]).decode(ids[path]) for path in FILES} == FILES
    row = join(ids, made[0].token_to_id(END_TOKEN))
    assert (row == made[0].token_to_id(END_TOKEN)).sum() == len(FILES)
    assert len(row) == sum(map(len, ids.values())) + len(FILES)
