/* Whether dicts, and modules that consist of them, are those of an earlier look, and as they were, told by a glance.
 *
 * A dict has a version, which is another one after each change, and unlike those of all other dicts. Where it lies,
 * `state/layouts.py` finds out and proves. Records are arrays of words with what was there at the time. Nothing of a
 * record is followed before what holds it was found unchanged, so all that is followed is alive; callers keep the
 * garbage collector from running meanwhile.
 */
#include "objects.h"

enum { LISTS_MAX = 4, DICT_BYTES = 48 };

/* -- modules ------------------------------------------------------------------------------------------------ */

/* What is asked of each module; see `look` in objects.c. */
typedef struct kind {
    PyObject *inner, *held, *noted, *absent;
    Py_ssize_t version_at, held_count, noted_count;
} kind;

/* Of each module: itself, its class, its dict, that one's version, and for each name an object and its mark. */
enum { MODULE, CLASS, DICT, VERSION, PAIRS };

static int parse_kind(kind *of)
{
    of->held_count = PyTuple_Size(of->held);
    of->noted_count = PyTuple_Size(of->noted);
    if (of->held_count <= LISTS_MAX)
        return 1;
    PyErr_SetString(PyExc_ValueError, "too many names");
    return -1;
}

static Py_ssize_t names_of(const kind *of)
{
    return 1 + of->held_count + of->noted_count;
}

static size_t stride_of(const kind *of)
{
    return (size_t)(PAIRS + 2 * names_of(of));
}

static PyObject *name_of(const kind *of, Py_ssize_t at)
{
    if (at == 0)
        return of->inner;
    return at <= of->held_count ? PyTuple_GetItem(of->held, at - 1) : PyTuple_GetItem(of->noted, at - 1 - of->held_count);
}

/* A number for the strings in a set; 0: there is something else in it. */
static int digest(PyObject *set, uint64_t *out)
{
    *out = 0;
    if (!PySet_Size(set))
        return 1;
    PyObject *items = PyObject_GetIter(set), *item;
    int result = items ? 1 : -1;
    while (result > 0 && (item = PyIter_Next(items))) {
        uint64_t hash = PyUnicode_CheckExact(item) ? (uint64_t)PyObject_Hash(item) : 0;
        result = PyUnicode_CheckExact(item);
        hash = (hash ^ (hash >> 32)) * 0x9e3779b97f4a7c15u;
        *out += hash ^ (hash >> 29);
        Py_DECREF(item);
    }
    Py_XDECREF(items);
    return PyErr_Occurred() ? -1 : result;
}

/* What is another one after each change of a dict, or of a set. */
static int mark_of(PyObject *object, Py_ssize_t version_at, uint64_t *out)
{
    if (!PyDict_Check(object))
        return PyAnySet_CheckExact(object) ? digest(object, out) : 0;
    *out = word_at(address_of(object), version_at);
    return 1;
}

static int add_values(PyObject *dict, made *values, PyObject *below)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    int result = !PyDict_Size(dict) || PyDict_CheckExact(dict);
    while (result > 0 && PyDict_Next(dict, &at, &key, &value)) {
        if (values)
            result = add(values, address_of(value));
        else if (value != Py_None)
            result = PyList_Append(below, value) < 0 ? -1 : 1;
    }
    return result;
}

static int study_module(PyObject *module, const kind *of, made *out, made *values, PyObject *below)
{
    PyObject *inside = PyObject_GenericGetDict(module, NULL);
    if (!inside)
        return PyErr_ExceptionMatches(PyExc_AttributeError) ? (PyErr_Clear(), 0) : -1;
    const uint64_t begin[PAIRS] = {address_of(module), address_of((PyObject *)Py_TYPE(module)), address_of(inside),
                                   word_at(address_of(inside), of->version_at)};
    int result = add_all(out, &(made){(uint64_t *)begin, PAIRS, PAIRS});
    for (Py_ssize_t at = 0; result > 0 && at < names_of(of); at++) {
        PyObject *found = PyDict_GetItemWithError(inside, name_of(of, at));
        uint64_t mark;
        result = found ? mark_of(found, of->version_at, &mark) : PyErr_Occurred() ? -1 : 0;
        if (result > 0 && at <= of->held_count)
            result = PyDict_Check(found) ? add_values(found, at ? values + at - 1 : NULL, below) : 0;
        if (result > 0 && (result = add(out, address_of(found))) > 0)
            result = add(out, mark);
    }
    for (Py_ssize_t at = 0; result > 0 && at < PyTuple_Size(of->absent); at++)
        if (PyDict_GetItemWithError(inside, PyTuple_GetItem(of->absent, at)))
            result = 0;
    Py_DECREF(inside);
    return PyErr_Occurred() ? -1 : result;
}

static int study_levels(PyObject *root, long levels_max, const kind *of, made *out, made *values)
{
    PyObject *level = PyList_New(0);
    int result = level && PyList_Append(level, root) == 0 ? 1 : -1;
    for (long deep = 0; result > 0 && PyList_Size(level) > 0; deep++) {
        PyObject *below = PyList_New(0);
        if (!below || deep == levels_max)
            result = below ? 0 : -1;
        for (Py_ssize_t at = 0; result > 0 && at < PyList_Size(level); at++)
            result = study_module(PyList_GetItem(level, at), of, out, values, below);
        Py_DECREF(level);
        level = below;
    }
    Py_XDECREF(level);
    return result;
}

/* A record of a module and all inside it: see _objects.pyi. In front of the modules: how many there are, and how many
 * values of each name of `held`; these come last. */
PyObject *study_modules(PyObject *module, PyObject *arguments)
{
    PyObject *root;
    long levels_max;
    kind of;
    made levels = {0}, values[LISTS_MAX] = {{0}}, out = {0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OlUO!O!O!n:study_modules", &root, &levels_max, &of.inner, &PyTuple_Type, &of.held,
                          &PyTuple_Type, &of.noted, &PyTuple_Type, &of.absent, &of.version_at)
        || parse_kind(&of) < 0)
        return NULL;
    int result = study_levels(root, levels_max, &of, &levels, values);
    if (result > 0)
        result = add(&out, levels.count / stride_of(&of));
    for (Py_ssize_t at = 0; result > 0 && at < of.held_count; at++)
        result = add(&out, values[at].count);
    if (result > 0)
        result = add_all(&out, &levels);
    for (Py_ssize_t at = 0; at < of.held_count; at++) {
        if (result > 0)
            result = add_all(&out, values + at);
        PyMem_Free(values[at].words);
    }
    PyMem_Free(levels.words);
    return finished(&out, result);
}

/* Whether a dict that has changed still has the same under each name. */
static int holds_the_same(PyObject *inside, const kind *of, const uint64_t *words)
{
    for (Py_ssize_t at = 0; at < names_of(of); at++)
        if (address_of(PyDict_GetItemWithError(inside, name_of(of, at))) != words[PAIRS + 2 * at])
            return 0;
    for (Py_ssize_t at = 0; at < PyTuple_Size(of->absent); at++)
        if (PyDict_GetItemWithError(inside, PyTuple_GetItem(of->absent, at)))
            return 0;
    return !PyErr_Occurred();
}

/* A module that is alive. Notes what its dict's version has become. */
static int module_again(uint64_t *words, const kind *of)
{
    PyObject *module = object_at(words[MODULE]);
    if (address_of((PyObject *)Py_TYPE(module)) != words[CLASS])
        return 0;
    PyObject *inside = PyObject_GenericGetDict(module, NULL);
    if (!inside)
        return -1;
    int result = address_of(inside) == words[DICT];
    const uint64_t version = word_at(address_of(inside), of->version_at);
    if (result && version != words[VERSION]) {
        result = holds_the_same(inside, of, words);
        if (result)
            words[VERSION] = version;
    }
    Py_DECREF(inside);
    for (Py_ssize_t at = 0; result > 0 && at < names_of(of); at++) {
        uint64_t mark = 0;
        result = mark_of(object_at(words[PAIRS + 2 * at]), of->version_at, &mark);
        if (result > 0)
            result = mark == words[PAIRS + 2 * at + 1];
    }
    return PyErr_Occurred() ? -1 : result;
}

static void fetch_module(const uint64_t *words, const kind *of)
{
    fetch(words[MODULE] - 32, 32 + OBJECT_BYTES); /* where its attributes are is in front of it */
    fetch(words[DICT], DICT_BYTES);
    for (Py_ssize_t at = 0; at < names_of(of); at++)
        fetch(words[PAIRS + 2 * at], DICT_BYTES);
}

/* Objects that are alive, as a list. */
static PyObject *list_of(const uint64_t *words, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t at = 0; list && at < count; at++) {
        if (at + AHEAD < count)
            __builtin_prefetch((const void *)(uintptr_t)words[at + AHEAD], 1);
        PyList_SetItem(list, (Py_ssize_t)at, Py_NewRef(object_at(words[at])));
    }
    return list;
}

PyObject *modules_again(PyObject *module, PyObject *arguments)
{
    PyObject *root, *out = NULL;
    kind of;
    Py_buffer record;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "Ow*UO!O!O!n:modules_again", &root, &record, &of.inner, &PyTuple_Type, &of.held,
                          &PyTuple_Type, &of.noted, &PyTuple_Type, &of.absent, &of.version_at))
        return NULL;
    int result = parse_kind(&of);
    uint64_t *words = record.buf, *first = words + 1 + of.held_count;
    const size_t count = words[0], stride = stride_of(&of);
    if (result > 0)
        result = first[MODULE] == address_of(root);
    for (size_t at = 0; result > 0 && at < count; at++) {
        if (at + AHEAD < count)
            fetch_module(first + (at + AHEAD) * stride, &of);
        result = module_again(first + at * stride, &of);
    }
    const uint64_t *values = first + count * stride;
    if (result > 0)
        out = PyTuple_New(of.held_count);
    for (Py_ssize_t at = 0; out && at < of.held_count; values += words[1 + at], at++) {
        PyObject *list = list_of(values, words[1 + at]);
        if (!list || PyTuple_SetItem(out, at, list) < 0)
            Py_CLEAR(out);
    }
    PyBuffer_Release(&record);
    return result == 0 ? Py_NewRef(Py_None) : out;
}

/* -- dicts in a dict ---------------------------------------------------------------------------------------- */

enum { OUTER, OUTER_VERSION, INNER_COUNT, INNERS };

PyObject *study_entries(PyObject *module, PyObject *arguments)
{
    PyObject *outer, *key, *value;
    Py_ssize_t version_at, at = 0;
    made inner = {0}, values = {0}, out = {0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "On:study_entries", &outer, &version_at))
        return NULL;
    int result = PyDict_Check(outer);
    while (result > 0 && PyDict_Next(outer, &at, &key, &value)) {
        result = PyDict_CheckExact(value);
        if (result > 0 && (result = add(&inner, address_of(value))) > 0)
            result = add(&inner, word_at(address_of(value), version_at));
        if (result > 0)
            result = add_values(value, &values, NULL);
    }
    if (result > 0) {
        const uint64_t begin[INNERS] = {address_of(outer), word_at(address_of(outer), version_at), inner.count / 2};
        result = add_all(&out, &(made){(uint64_t *)begin, INNERS, INNERS});
    }
    if (result > 0 && (result = add_all(&out, &inner)) > 0)
        result = add_all(&out, &values);
    PyMem_Free(inner.words);
    PyMem_Free(values.words);
    return finished(&out, result);
}

PyObject *entries_again(PyObject *module, PyObject *arguments)
{
    PyObject *outer, *out = NULL;
    Py_ssize_t version_at;
    Py_buffer record;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "Oy*n:entries_again", &outer, &record, &version_at))
        return NULL;
    const uint64_t *words = record.buf, *inner = words + INNERS;
    const size_t count = words[INNER_COUNT];
    const size_t values = (size_t)record.len / sizeof *words - INNERS - 2 * count;
    int same = address_of(outer) == words[OUTER] && word_at(words[OUTER], version_at) == words[OUTER_VERSION];
    for (size_t at = 0; same && at < count; at++) {
        if (at + AHEAD < count)
            fetch(inner[2 * (at + AHEAD)], DICT_BYTES);
        same = word_at(inner[2 * at], version_at) == inner[2 * at + 1];
    }
    out = same ? list_of(inner + 2 * count, values) : Py_NewRef(Py_None);
    PyBuffer_Release(&record);
    return out;
}
