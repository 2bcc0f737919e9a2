/* Whether tensors are those of an earlier look, and as they were, told by a glance at their memory: a tensor's metadata
 * are the bytes of one object, and the address in another. Where they lie, `state/layouts.py` finds out and proves.
 */
#include <malloc.h>
#include "objects.h"

enum {
    DIMENSIONS_MAX = 5,      /* of more, torch keeps shape and strides elsewhere */
    STORAGE_BYTES = 2 * LINE, /* of torch's object for a storage, what is looked at to ask for it */
};

/* Where what lies, in bytes from the begin of: the Python object; torch's object; its storage; its counter. */
typedef struct layout {
    Py_ssize_t torch_at, size, storage_at, data_at, version_at, counter_at, gradients_at;
    unsigned long long table; /* of a plain tensor's virtual functions, which its object begins with */
    PyObject *question;
    PyCFunction storage_of; /* a tensor's method, called without what Python does for that */
} layout;

/* Of each tensor: the object, its class, torch's object, whether it requires gradients, where its data are, and Python's
 * object for its storage, which is not looked at; and then torch's object as it is, of which the second word counts
 * references. */
enum { TENSOR, TENSOR_CLASS, TORCH, GRADIENTS, DATA, STORAGE, INSIDE, COUNTS = 1 };

static int parse_layout(PyObject *given, layout *of)
{
    const int good = PyArg_ParseTuple(given, "nnnnnnnK:layout", &of->torch_at, &of->size, &of->storage_at, &of->data_at,
                                      &of->version_at, &of->counter_at, &of->gradients_at, &of->table);
    of->question = good ? PyUnicode_InternFromString("requires_grad") : NULL;
    return of->question ? 1 : -1;
}

/* A tensor that keeps nothing for gradients does not require them; others are asked. */
static int requires_gradients(PyObject *tensor, uint64_t inside, const layout *of, uint64_t *out)
{
    *out = 0;
    if (!word_at(inside, of->gradients_at))
        return 1;
    PyObject *answer = PyObject_GetAttr(tensor, of->question);
    *out = answer == Py_True;
    Py_XDECREF(answer);
    return answer ? 1 : -1;
}

/* Whether all metadata are in torch's object. */
static int is_flat(PyObject *tensor)
{
    PyObject *dimensions = PyObject_GetAttrString(tensor, "ndim");
    const long count = dimensions ? PyLong_AsLong(dimensions) : -1;
    Py_XDECREF(dimensions);
    return PyErr_Occurred() ? -1 : count <= DIMENSIONS_MAX;
}

static int study_tensor(PyObject *tensor, const layout *of, made *out)
{
    const uint64_t inside = word_at(address_of(tensor), of->torch_at);
    if (!inside || malloc_usable_size((void *)(uintptr_t)inside) < (size_t)of->size || word_at(inside, 0) != of->table)
        return 0;
    const uint64_t storage = word_at(inside, of->storage_at);
    uint64_t gradients;
    int result = storage && word_at(inside, of->version_at) ? requires_gradients(tensor, inside, of, &gradients) : 0;
    if (result <= 0)
        return result;
    PyObject *object = PyObject_CallMethod(tensor, "untyped_storage", NULL);
    if (!object)
        return -1;
    const uint64_t begin[INSIDE] = {address_of(tensor), address_of((PyObject *)Py_TYPE(tensor)), inside, gradients,
                                    word_at(storage, of->data_at), address_of(object)};
    Py_DECREF(object);
    result = add_all(out, &(made){(uint64_t *)begin, INSIDE, INSIDE});
    for (Py_ssize_t at = 0; result > 0 && at < of->size; at += (Py_ssize_t)sizeof inside)
        result = add(out, word_at(inside, at));
    return result;
}

PyObject *study_tensors(PyObject *module, PyObject *arguments)
{
    PyObject *tensors, *classes, *given;
    layout of;
    made out = {0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!O!O!:study_tensors", &PyList_Type, &tensors, &PyTuple_Type, &classes, &PyTuple_Type,
                          &given)
        || parse_layout(given, &of) < 0)
        return NULL;
    int result = 1;
    for (Py_ssize_t at = 0; result > 0 && at < PyList_Size(tensors); at++) {
        PyObject *tensor = PyList_GetItem(tensors, at);
        result = PySequence_Contains(classes, (PyObject *)Py_TYPE(tensor));
        if (result > 0)
            result = is_flat(tensor);
        if (result > 0)
            result = study_tensor(tensor, &of, &out);
    }
    Py_DECREF(of.question);
    return finished(&out, result);
}

static void fetch_tensor(const uint64_t *words, const layout *of)
{
    fetch(words[TENSOR], OBJECT_BYTES);
    fetch(words[TORCH], (size_t)of->size);
    fetch(words[INSIDE + of->storage_at / 8], STORAGE_BYTES);
    fetch(words[STORAGE], OBJECT_BYTES);
    fetch(words[INSIDE + of->version_at / 8] + (uint64_t)of->counter_at, sizeof(uint32_t));
    fetch(words[INSIDE + of->gradients_at / 8], words[INSIDE + of->gradients_at / 8] ? 3 * LINE : 0);
}

static int tensor_again(PyObject *tensor, const uint64_t *words, const layout *of, int64_t *counter)
{
    if (address_of(tensor) != words[TENSOR] || address_of((PyObject *)Py_TYPE(tensor)) != words[TENSOR_CLASS]
        || word_at(words[TENSOR], of->torch_at) != words[TORCH])
        return 0;
    const char *inside = (const char *)(uintptr_t)words[TORCH];
    const size_t counts = COUNTS * sizeof *words, behind = counts + sizeof *words;
    const char *known = (const char *)(words + INSIDE);
    if (memcmp(inside, known, counts) || memcmp(inside + behind, known + behind, (size_t)of->size - behind))
        return 0;
    if (word_at(word_at(words[TORCH], of->storage_at), of->data_at) != words[DATA])
        return 0;
    uint32_t found;
    memcpy(&found, (const char *)(uintptr_t)word_at(words[TORCH], of->version_at) + of->counter_at, sizeof found);
    *counter = found;
    uint64_t gradients;
    const int result = requires_gradients(tensor, words[TORCH], of, &gradients);
    return result > 0 ? gradients == words[GRADIENTS] : result;
}

/* How to ask tensors for their storages. */
static int find_method(PyObject *tensor, layout *of)
{
    PyObject *method = PyObject_GetAttrString(tensor, "untyped_storage");
    const int good = method && PyCFunction_Check(method) && PyCFunction_GetFlags(method) == METH_NOARGS;
    of->storage_of = good ? PyCFunction_GetFunction(method) : NULL;
    Py_XDECREF(method);
    return method ? good : -1;
}

static int all_again(PyObject *tensors, const uint64_t *words, layout *of, PyObject *storages, int64_t *counters)
{
    const Py_ssize_t stride = INSIDE + of->size / 8, count = PyList_Size(tensors);
    int result = count > 0 ? find_method(PyList_GetItem(tensors, 0), of) : 1;
    for (Py_ssize_t at = 0; result > 0 && at < count; at++) {
        PyObject *tensor = PyList_GetItem(tensors, at);
        if (at + AHEAD < count)
            fetch_tensor(words + (at + AHEAD) * stride, of);
        result = tensor_again(tensor, words + at * stride, of, counters + at);
        PyObject *storage = result > 0 ? of->storage_of(tensor, NULL) : NULL;
        if (result > 0 && (!storage || PyList_SetItem(storages, at, storage) < 0))
            result = -1;
    }
    return result;
}

PyObject *tensors_again(PyObject *module, PyObject *arguments)
{
    PyObject *tensors, *given, *out = NULL;
    Py_buffer record;
    layout of;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!y*O!:tensors_again", &PyList_Type, &tensors, &record, &PyTuple_Type, &given))
        return NULL;
    int result = parse_layout(given, &of);
    const Py_ssize_t count = PyList_Size(tensors);
    if (result > 0)
        result = record.len == count * (INSIDE + of.size / 8) * 8;
    PyObject *counters = result > 0 ? PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t)) : NULL;
    PyObject *storages = counters ? PyList_New(count) : NULL;
    if (storages)
        result = all_again(tensors, record.buf, &of, storages, (int64_t *)PyBytes_AsString(counters));
    if (storages && result > 0)
        out = PyTuple_Pack(2, counters, storages);
    PyBuffer_Release(&record);
    Py_XDECREF(of.question);
    Py_XDECREF(counters);
    Py_XDECREF(storages);
    return result == 0 ? Py_NewRef(Py_None) : out;
}
