"""Translation: languages of a vocabulary, and positions of their tokens."""

import pytest

from numflow.engine.load import load
from numflow.errors import RequestError
from tests.engine.fake import fake_model, used_blocks
from tests.engine.translators import write_translator


def translator(folder, languages, *arguments, **options):
    return load(write_translator(folder, languages, *arguments, **options), backend="reference", block_size=4)


ROWS = [  # languages, what the tokenizer puts around text, ids the encoder reads, decoder start -> decoder's first ids
    (("__en__", "__fr__"), "$A </s>", "en", "fr", [30, 4, 5, 2], 2, [2, 31]),
    (("__fr__", "__en__"), "__fr__ $A </s>", "en", "fr", [31, 4, 5, 2], 2, [2, 30]),
    (("eng_Latn", "fra_Latn"), "eng_Latn $A </s>", "fra_Latn", "eng_Latn", [31, 4, 5, 2], 2, [2, 30]),
    (("eng_Latn", "fra_Latn"), "$A </s> eng_Latn", "fra", "eng", [4, 5, 2, 31], 2, [2, 30]),
    (("en_XX", "fr_XX"), "$A </s> en_XX", "en", "fr", [4, 5, 2, 30], 30, [31]),
]


@pytest.mark.parametrize(("languages", "template", "source", "target", "encoder", "start", "first"), ROWS)
def test_where_the_languages_go(tmp_path, languages, template, source, target, encoder, start, first):
    with translator(tmp_path, languages, template, decoder_start_token_id=start) as model:
        result = model.translate("w0 w1", source, target, max_tokens=6, ignore_eos=True)
        assert result.ids == model.generate(encoder, max_tokens=6, ignore_eos=True, decoder_ids=first).ids
        assert result.text == model.tokenizer.decode(result.ids)
        beams = model.translate("w0 w1", source, target, max_tokens=6, num_beams=3)
        assert len(beams.ids) > 0 or beams.finish_reason == "stop"
        assert used_blocks(model) == 0


def test_the_target_counts_as_the_first_generated_token(tmp_path):
    """As if the model's own files forced it, which is what published results are held to."""
    with translator(tmp_path, ("__en__", "__fr__"), forced_bos_token_id=31, num_beams=4, max_length=10) as model:
        expected = model.generate([30, 4, 5, 2], max_tokens=8, num_beams=4, length_penalty=1.7)
        found = model.translate("w0 w1", "en", "fr", length_penalty=1.7)
        assert (found.ids, found.score) == (expected.ids, expected.score)
        greedy = model.translate("w0 w1", "en", "fr", temperature=0.0)
        assert (greedy.ids, greedy.score) == (model.generate([30, 4, 5, 2], max_tokens=8).ids, None)


def test_a_language_in_the_text(tmp_path):
    with translator(tmp_path, (">>fr<<", ">>pt_br<<"), special=False) as model:
        assert dict(model.languages.ids) == {"fr": 30, "pt_br": 31}
        found = model.translate("w0 w1", target="pt_br", max_tokens=6, ignore_eos=True)
        assert found.ids == model.generate([31, 4, 5, 2], max_tokens=6, ignore_eos=True).ids
        with pytest.raises(RequestError, match="reads one language only.*leave out source"):
            model.translate("w0", "en", "fr")
        with pytest.raises(RequestError, match="give target: the model has fr, pt_br"):
            model.translate("w0")


def test_texts_do_not_notice_each_other(tmp_path):
    with translator(tmp_path, ("__en__", "__fr__")) as model:
        texts = ["w0", "w1 w2 w3 w4 w5 w6 w7", "", "w9 w8 w7 w6 w5 w4 w3 w2 w1 w0 w1 w2 w3 w4 w5 w6 w7 w8 w9", "w5 w5"]
        for settings in ({}, {"num_beams": 4, "no_repeat_ngram": 2}):
            together = model.translate(texts, "en", "fr", max_tokens=9, **settings)
            alone = [model.translate(text, "en", "fr", max_tokens=9, **settings) for text in texts]
            assert [(g.ids, g.finish_reason) for g in together] == [(g.ids, g.finish_reason) for g in alone]
        assert model.translate([], "en", "fr") == []
        assert used_blocks(model) == 0


def test_written_languages_are_text(tmp_path):
    with translator(tmp_path, ("__en__", "__fr__")) as model:
        unknown = model.generate([30, 3, 2], max_tokens=4, ignore_eos=True, decoder_ids=[2, 31]).ids
        assert model.translate("__en__", "en", "fr", max_tokens=4, ignore_eos=True).ids == unknown


def test_what_cannot_be_translated(tmp_path):
    with translator(tmp_path, ("__en__", "__fr__", "__de__")) as model:
        with pytest.raises(RequestError, match="has no language 'xx'; known: de, en, fr"):
            model.translate("w0", "xx", "fr")
        with pytest.raises(RequestError, match="has no language 'english'"):
            model.translate("w0", "en", "english")
        for given in ({}, {"source": "en"}, {"target": "fr"}):
            with pytest.raises(RequestError, match="give source and target: the model has de, en, fr"):
                model.translate("w0", **given)
        with pytest.raises(RequestError, match="prompt has 50 tokens; the model's context is 48"):
            model.translate("w0 " * 48, "en", "fr")
        with pytest.raises(RequestError, match="leave out decoder_ids"):
            model.translate("w0", "en", "fr", decoder_ids=[2])
        with pytest.raises(RequestError, match="needs a text or a list of texts"):
            model.translate([3], "en", "fr")
        with pytest.raises(RequestError, match="no setting 'beams'"):
            model.translate("w0", "en", "fr", beams=3)
    with pytest.raises(RequestError, match="fake has no encoder: it cannot translate"):
        fake_model().translate("hello", "en", "fr")


def test_a_language_that_is_not_clear(tmp_path):
    unclear = pytest.raises(RequestError, match="has no language 'zho'; it could be zho_Hans, zho_Hant")
    with translator(tmp_path, ("zho_Hans", "zho_Hant", "eng_Latn")) as model, unclear:
        model.translate("w0", "zho", "eng_Latn")


def test_a_model_of_one_pair(tmp_path):
    with translator(tmp_path, ()) as model:
        found = model.translate("w0 w1", max_tokens=5, ignore_eos=True)
        assert found.ids == model.generate([4, 5, 2], max_tokens=5, ignore_eos=True).ids
        with pytest.raises(RequestError, match="names no languages"):
            model.translate("w0", "en", "fr")


def test_texts_to_texts_by_generate(tmp_path):
    """A model of many tasks: its encoder reads the text, its decoder begins with the start token."""
    with translator(tmp_path, (), case="t5", decoder_start_token_id=0) as model:
        found = model.generate("w0 w1", max_tokens=5, ignore_eos=True)
        assert found.ids == model.generate([4, 5, 2], max_tokens=5, ignore_eos=True, decoder_ids=[0]).ids
        assert found.text == model.tokenizer.decode(found.ids)
