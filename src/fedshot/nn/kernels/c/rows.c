/* Finding repeated rows, such as the vectors of frequent words.
 *
 * There are `texts` x `words` rows of `width` floats, with a stride of `text` floats between texts and
 * `word` floats between words. Rows are equal if their bits are.
 */

static inline uint64_t row_hash(const float *row, size width) {
    uint64_t h = (uint64_t)width;
    size k = 0;
    for (; k + 2 <= width; k += 2) {
        uint64_t two;
        memcpy(&two, row + k, sizeof two);
        h = (h ^ two) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    if (k < width) {
        uint32_t one;
        memcpy(&one, row + k, sizeof one);
        h = (h ^ one) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    return h;
}

/* `which` becomes the index of each row among the distinct rows, in order of first occurrence;
 * `first` gets the positions of the first occurrences, `found` their number. `table` has a power of
 * two of slots, more than there are rows, all -1. */
void fedshot_same_rows(const float *restrict x, size texts, size words, size width, size text,
                       size word, size slots, int64_t *restrict which, int64_t *restrict first,
                       int64_t *restrict table, int64_t *restrict found) {
    int64_t different = 0;
    for (size i = 0; i < texts * words; i++) {
        const float *row = x + (i / words) * text + (i % words) * word;
        size slot = (size)(row_hash(row, width) & (uint64_t)(slots - 1));
        int64_t seen;
        while ((seen = table[slot]) >= 0) {
            size j = (size)first[seen];
            const float *other = x + (j / words) * text + (j % words) * word;
            if (!memcmp(row, other, (size_t)width * sizeof *row)) break;
            slot = (slot + 1) & (slots - 1);
        }
        if (seen < 0) {
            table[slot] = seen = different;
            first[different++] = i;
        }
        which[i] = seen;
    }
    *found = different;
}

/* Add the columns `from` to `to` of each row of x [rows, width] to row which[row] of the sums. */
void fedshot_add_rows(const float *restrict x, const int64_t *restrict which, size from, size to,
                      size rows, size width, float *restrict sums) {
    for (size i = 0; i < rows; i++) {
        const float *row = x + i * width;
        float *sum = sums + which[i] * width;
        for (size k = from; k < to; k++) sum[k] += row[k];
    }
}
