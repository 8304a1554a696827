"""Why records and shards are left out: the keys of every count, and what each means in words."""

FILES = frozenset({"duplicate_member", "other_member"})  # of these, files are counted; a record may use its others
CAUSES: dict[str, str] = {
    # shards
    "missing_shard": "no such file or address",
    "unreachable_shard": "no connection, no permission, or a server that is too slow",
    "refused_shard": "at an address that a run from a link may not name",
    "empty_shard": "a shard without files",
    "bad_shard": "not a shard of this kind, or damaged",
    "cut_shard": "a shard that ends too early; what came before is used",
    "unindexed_shard": "a shard of codes without its index beside it",
    "bad_index_shard": "an index that is damaged or no index of code shards",
    "other_tokenizer_shard": "codes of another image tokenizer than the run's",
    "unleased": "a shard read without a lease, since others claimed everything",
    # records
    "duplicate_member": "a second file of the same name in one record; the first is used",
    "other_member": "a file that is no picture, caption or metadata by its name, or a second one of them; or a link",
    "missing_json": "no metadata, so that nobody knows whether it is safe",
    "bad_json": "metadata that cannot be read",
    "missing_caption": "no caption",
    "short_caption": "a caption shorter than the run allows",
    "nsfw": "not marked as safe for work",
    "aspect": "too wide or too high",
    "too_small": "a picture smaller than the run allows",
    "similarity": "caption and picture are not alike enough, or nobody has measured it",
    "language": "a language that the run does not take, or nobody knows which",
    "duplicate": "the picture of an earlier record of its shard",
    "missing_image": "no image",
    "image_too_large": "an image of too many bytes or pixels",
    "bad_image": "an image that cannot be read to its end",
    "missing_codes": "no image codes",
    "bad_codes": "image codes that are damaged or of another length",
    "codes_out_of_range": "image codes outside the model's vocabulary",
    # samples
    "samples_lost": "read, and in no step: numbers not finite, out of memory, or of a model that was given up",
    "ranges_read_twice": "ranges that another peer turned out to read as well, as after a cut between the peers",
    "samples_without_credit": "read by another peer too, or without a lease",
}
