/* Convolutions on CPU in the layout that oneDNN likes best; convolutions.py builds and loads it.
 *
 * MindSpore asks oneDNN, the library of its CPU kernels, for convolutions in the plain layout of its tensors, for which
 * oneDNN has slow ways only. take_over() puts the functions below in place of oneDNN's in the tables in which the
 * dynamic linker has put their addresses. They let oneDNN choose the layout and have it copy the tensors from and to
 * the plain one, as PyTorch does. All else stays as MindSpore has asked.
 * Names and numbers are those of oneDNN 3's C interface, https://uxlfoundation.github.io/oneDNN/.
 */
#define _GNU_SOURCE
#include "linker_table.h"

#include <dlfcn.h>
#include <pthread.h>
#include <search.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 1, INVALID_ARGUMENTS = 2, CONVOLUTION = 5, FLOAT32 = 3, ANY_LAYOUT = 1, MAX_DIMENSIONS = 12 };
enum { ENGINE = 1, KIND = 2, ARGUMENT = 255, DIMENSIONS = 256, SHAPE = 257, NUMBERS = 258 }; /* queries */
enum { SRC = 1, DST = 17, DIFF_SRC = 129, DIFF_WEIGHTS = 161 };                              /* arguments */

typedef void *handle; /* oneDNN's objects; a layout is its memory descriptor */
typedef int64_t shape[MAX_DIMENSIONS];
struct argument {
    int which;
    handle memory;
};

/* oneDNN's own functions: those that are replaced, then others that are called. */
#define REPLACED(X)                                                                                             \
    X(primitive_create, handle *, handle)                                                                       \
    X(primitive_destroy, handle)                                                                                \
    X(primitive_execute, handle, handle, int, const struct argument *)                                          \
    X(convolution_forward_primitive_desc_create, handle *, handle, int, int, handle, handle, handle, handle,    \
      const int64_t *, const int64_t *, const int64_t *, const int64_t *, handle)                               \
    X(convolution_backward_data_primitive_desc_create, handle *, handle, int, handle, handle, handle,           \
      const int64_t *, const int64_t *, const int64_t *, const int64_t *, handle, handle)                       \
    X(convolution_backward_weights_primitive_desc_create, handle *, handle, int, handle, handle, handle, handle, \
      const int64_t *, const int64_t *, const int64_t *, const int64_t *, handle, handle)
#define CALLED(X)                                                                                               \
    X(primitive_desc_query, handle, int, int, void *)                                                           \
    X(primitive_desc_destroy, handle)                                                                           \
    X(primitive_get_primitive_desc, handle, handle *)                                                           \
    X(reorder_primitive_desc_create, handle *, handle, handle, handle, handle, handle)                          \
    X(memory_create, handle *, handle, handle, void *)                                                          \
    X(memory_destroy, handle)                                                                                   \
    X(memory_get_memory_desc, handle, handle *)                                                                 \
    X(memory_desc_create_with_tag, handle *, int, const int64_t *, int, int)                                    \
    X(memory_desc_create_with_strides, handle *, int, const int64_t *, int, const int64_t *)                    \
    X(memory_desc_query, handle, int, void *)                                                                   \
    X(memory_desc_equal, handle, handle)                                                                        \
    X(memory_desc_destroy, handle)                                                                              \
    X(primitive_attr_get_post_ops, handle, handle *)                                                            \
    X(post_ops_len, handle)
#define DECLARE(name, ...) static int (*name)(__VA_ARGS__);
REPLACED(DECLARE)
CALLED(DECLARE)
static handle (*primitive_desc_query_md)(handle, int, int);
static size_t (*memory_desc_get_size)(handle);

static bool active; /* are all functions replaced? With some of them only, no layout may be left to oneDNN */

/* A convolution and, for each argument that is in another layout than its own, what copies it. */
struct record {
    handle convolution, engine, copies[4];
    int which[4];
};
static void *records; /* a tree, by the convolution */
static pthread_rwlock_t records_lock = PTHREAD_RWLOCK_INITIALIZER;

static int by_convolution(const void *a, const void *b)
{
    const struct record *one = a, *other = b;
    return (one->convolution > other->convolution) - (one->convolution < other->convolution);
}

/* Room for copies. It is kept for the next convolutions, for most of a step's are one after the other. */
static struct room {
    void *begin;
    size_t size;
    bool taken;
} rooms[64];
static pthread_mutex_t rooms_lock = PTHREAD_MUTEX_INITIALIZER;

static struct room *take_room(size_t size)
{
    struct room *best = NULL;
    pthread_mutex_lock(&rooms_lock);
    for (struct room *room = rooms; room < rooms + 64; room++) /* the smallest that is large enough, or the largest */
        if (!room->taken && (!best || (room->size >= size ? best->size < size || room->size < best->size
                                                          : room->size > best->size)))
            best = room;
    if (best && best->size < size) {
        free(best->begin);
        best->size = (size + 4095) / 4096 * 4096;
        best->begin = aligned_alloc(4096, best->size);
        if (!best->begin)
            best->size = 0, best = NULL;
    }
    if (best)
        best->taken = true;
    pthread_mutex_unlock(&rooms_lock);
    return best;
}

static void give_back(struct room *room)
{
    pthread_mutex_lock(&rooms_lock);
    room->taken = false;
    pthread_mutex_unlock(&rooms_lock);
}

/* The same tensor in a layout of oneDNN's choice, or NULL unless it is float32 in the plain layout. */
static handle in_any_layout(handle given)
{
    int dimensions = 0, numbers = 0;
    const int64_t *lengths = NULL;
    shape strides;
    handle plain = NULL, any = NULL;
    if (!given || memory_desc_query(given, DIMENSIONS, &dimensions) || dimensions < 1 ||
        memory_desc_query(given, NUMBERS, &numbers) || numbers != FLOAT32 || memory_desc_query(given, SHAPE, &lengths))
        return NULL;
    int64_t step = 1;
    for (int i = dimensions - 1; i >= 0; step *= lengths[i--])
        strides[i] = step;
    if (memory_desc_create_with_strides(&plain, dimensions, lengths, numbers, strides))
        return NULL;
    if (memory_desc_equal(given, plain) &&
        memory_desc_create_with_tag(&any, dimensions, lengths, numbers, ANY_LAYOUT) != SUCCESS)
        any = NULL;
    memory_desc_destroy(plain);
    return any;
}

/* Does nothing follow the convolution? What does may read its result, in the layout that was asked for. */
static bool nothing_follows(handle attributes)
{
    handle following = NULL;
    return !attributes || (primitive_attr_get_post_ops(attributes, &following) == SUCCESS && post_ops_len(following) == 0);
}

/* Three tensors of a convolution in any layout; false, with nothing to free, if one must stay as it is. */
static bool loosen(handle any[3], handle a, handle b, handle c, handle attributes)
{
    if (!active)
        return false;
    any[0] = in_any_layout(a), any[1] = in_any_layout(b), any[2] = in_any_layout(c);
    if (any[0] && any[1] && any[2] && nothing_follows(attributes))
        return true;
    for (int i = 0; i < 3; i++)
        if (any[i])
            memory_desc_destroy(any[i]);
    return false;
}

static bool made(int status, handle any[3])
{
    for (int i = 0; i < 3; i++)
        memory_desc_destroy(any[i]);
    return status == SUCCESS;
}

static int my_convolution_forward_primitive_desc_create(
    handle *out, handle engine, int purpose, int algorithm, handle src, handle weights, handle bias, handle dst,
    const int64_t *strides, const int64_t *dilates, const int64_t *left, const int64_t *right, handle attributes)
{
    handle any[3];
    if (loosen(any, src, weights, dst, attributes) &&
        made(convolution_forward_primitive_desc_create(out, engine, purpose, algorithm, any[0], any[1], bias, any[2],
                                                       strides, dilates, left, right, attributes), any))
        return SUCCESS;
    return convolution_forward_primitive_desc_create(out, engine, purpose, algorithm, src, weights, bias, dst, strides,
                                                     dilates, left, right, attributes);
}

static int my_convolution_backward_data_primitive_desc_create(
    handle *out, handle engine, int algorithm, handle diff_src, handle weights, handle diff_dst, const int64_t *strides,
    const int64_t *dilates, const int64_t *left, const int64_t *right, handle forward, handle attributes)
{
    handle any[3];
    if (loosen(any, diff_src, weights, diff_dst, attributes) &&
        made(convolution_backward_data_primitive_desc_create(out, engine, algorithm, any[0], any[1], any[2], strides,
                                                             dilates, left, right, forward, attributes), any))
        return SUCCESS;
    return convolution_backward_data_primitive_desc_create(out, engine, algorithm, diff_src, weights, diff_dst, strides,
                                                           dilates, left, right, forward, attributes);
}

static int my_convolution_backward_weights_primitive_desc_create(
    handle *out, handle engine, int algorithm, handle src, handle diff_weights, handle diff_bias, handle diff_dst,
    const int64_t *strides, const int64_t *dilates, const int64_t *left, const int64_t *right, handle forward,
    handle attributes)
{
    handle any[3];
    if (loosen(any, src, diff_weights, diff_dst, attributes) &&
        made(convolution_backward_weights_primitive_desc_create(out, engine, algorithm, any[0], any[1], diff_bias, any[2],
                                                                strides, dilates, left, right, forward, attributes),
             any))
        return SUCCESS;
    return convolution_backward_weights_primitive_desc_create(out, engine, algorithm, src, diff_weights, diff_bias,
                                                              diff_dst, strides, dilates, left, right, forward,
                                                              attributes);
}

static int my_primitive_create(handle *primitive, handle description)
{
    int kind = 0, status = primitive_create(primitive, description);
    if (status || primitive_desc_query(description, KIND, 0, &kind) || kind != CONVOLUTION)
        return status;
    struct record *record = calloc(1, sizeof(*record));
    if (!record || primitive_desc_query(description, ENGINE, 0, &record->engine)) {
        free(record);
        primitive_destroy(*primitive);
        return OUT_OF_MEMORY;
    }
    record->convolution = *primitive;
    pthread_rwlock_wrlock(&records_lock);
    tsearch(record, &records, by_convolution);
    pthread_rwlock_unlock(&records_lock);
    return SUCCESS;
}

static struct record *find(handle primitive)
{
    struct record wanted = {.convolution = primitive};
    pthread_rwlock_rdlock(&records_lock);
    struct record **node = tfind(&wanted, &records, by_convolution), *found = node ? *node : NULL;
    pthread_rwlock_unlock(&records_lock);
    return found;
}

static int my_primitive_destroy(handle primitive)
{
    struct record *record = find(primitive);
    if (record) {
        pthread_rwlock_wrlock(&records_lock);
        tdelete(record, &records, by_convolution);
        pthread_rwlock_unlock(&records_lock);
        for (int i = 0; i < 4; i++)
            if (record->copies[i])
                primitive_destroy(record->copies[i]);
        free(record);
    }
    return primitive_destroy(primitive);
}

/* Copy a tensor into another layout; what does it for this argument is made at the first time. */
static int copy(struct record *record, int which, handle stream, handle from, handle to)
{
    int i = 0;
    while (i < 3 && record->copies[i] && record->which[i] != which)
        i++;
    if (!record->copies[i]) {
        handle from_layout, to_layout, description = NULL;
        int status = memory_get_memory_desc(from, &from_layout);
        status = status ? status : memory_get_memory_desc(to, &to_layout);
        status = status ? status : reorder_primitive_desc_create(&description, from_layout, record->engine, to_layout,
                                                                 record->engine, NULL);
        status = status ? status : primitive_create(&record->copies[i], description);
        if (description)
            primitive_desc_destroy(description);
        if (status)
            return status;
        record->which[i] = which;
    }
    struct argument both[2] = {{SRC, from}, {DST, to}};
    return primitive_execute(record->copies[i], stream, 2, both);
}

static int my_primitive_execute(handle primitive, handle stream, int count, const struct argument *given)
{
    struct record *record = find(primitive);
    handle description, wanted, has;
    if (!record)
        return primitive_execute(primitive, stream, count, given);
    if (count > 8 || primitive_get_primitive_desc(primitive, &description))
        return INVALID_ARGUMENTS; /* it may not be computed in the layouts that were given */
    struct argument used[8];
    struct room *room[8] = {NULL};
    handle memory[8] = {NULL};
    int status = SUCCESS, result = DST;
    for (int i = 0; i < count; i++)
        if (given[i].which == DIFF_SRC || given[i].which == DIFF_WEIGHTS)
            result = given[i].which;
    for (int i = 0; i < count && status == SUCCESS; i++) {
        used[i] = given[i];
        wanted = primitive_desc_query_md(description, ARGUMENT, given[i].which);
        status = memory_get_memory_desc(given[i].memory, &has);
        if (status || !wanted || memory_desc_equal(wanted, has))
            continue;
        room[i] = take_room(memory_desc_get_size(wanted));
        status = room[i] ? memory_create(&memory[i], wanted, record->engine, room[i]->begin) : OUT_OF_MEMORY;
        used[i].memory = memory[i];
        if (status == SUCCESS && given[i].which != result)
            status = copy(record, given[i].which, stream, given[i].memory, memory[i]);
    }
    status = status ? status : primitive_execute(primitive, stream, count, used);
    for (int i = 0; i < count; i++) {
        if (status == SUCCESS && memory[i] && given[i].which == result)
            status = copy(record, result, stream, memory[i], given[i].memory);
        if (memory[i])
            memory_destroy(memory[i]);
        if (room[i])
            give_back(room[i]);
    }
    return status;
}

static int seen; /* of the functions that are replaced, one bit each */

static void *own_function(const char *name)
{
    int bit = 1;
    if (strncmp(name, "dnnl_", 5) != 0)
        return NULL;
#define CHOOSE(function, ...)                        \
    if (strcmp(name + 5, #function) == 0) {          \
        seen |= bit;                                 \
        return (void *)my_##function;                \
    }                                                \
    bit <<= 1;
    REPLACED(CHOOSE)
    return NULL;
}

static void *look(const char *name, void *now)
{
    (void)now;
    own_function(name);
    return NULL;
}

static void *replace(const char *name, void *now)
{
    void *own = own_function(name);
    return own == now ? NULL : own;
}

/* Called with oneDNN's library, which MindSpore has loaded; returns whether its convolutions are quick from now on. */
bool take_over(const char *library)
{
    handle onednn = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    const int *(*version)(void) = onednn ? (const int *(*)(void))dlsym(onednn, "dnnl_version") : NULL;
    if (!version || version()[0] != 3)
        return false;
    bool complete = true;
#define FIND(function, ...) complete &= (*(void **)&function = dlsym(onednn, "dnnl_" #function)) != NULL;
    REPLACED(FIND)
    CALLED(FIND)
    FIND(primitive_desc_query_md)
    FIND(memory_desc_get_size)
    seen = 0;
    if (complete)
        look_at_calls(look);
    if (seen != 63)
        return false;
    active = look_at_calls(replace);
    return active;
}
