/* What objects consist of, asked natively: Python takes a microsecond for each, and whoever saves waits for that.
 *
 * An extension of its own, in the stable ABI: cffi's functions let go of the interpreter, and these need it throughout.
 * Nothing here runs code of the objects that it looks at, so they do not change meanwhile.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

static int append_size(PyObject *list, Py_ssize_t size)
{
    PyObject *number = PyLong_FromSsize_t(size);
    int result = number ? PyList_Append(list, number) : -1;
    Py_XDECREF(number);
    return result;
}

/* A dict's size, its keys, each followed by None if its value is that; the values. 0: it is of another kind. */
static int append_entries(PyObject *dict, PyObject *trace, PyObject *values)
{
    PyObject *key, *value;
    Py_ssize_t at = 0, size = PyDict_Check(dict) ? PyDict_Size(dict) : -1;
    if (size < 0 || (size > 0 && !PyDict_CheckExact(dict))) /* an OrderedDict has an order of its own */
        return 0;
    if (append_size(trace, size) < 0)
        return -1;
    while (PyDict_Next(dict, &at, &key, &value)) {
        if (!PyUnicode_CheckExact(key))
            return 0;
        if (PyList_Append(trace, key) < 0 || (value == Py_None && PyList_Append(trace, Py_None) < 0) ||
            PyList_Append(values, value) < 0)
            return -1;
        __builtin_prefetch(value, 1);
    }
    return 1;
}

/* What to ask of each object, and where to put the answers. */
typedef struct what {
    PyObject *inner;  /* the attribute with the objects inside an object */
    PyObject *held;   /* tuple of names: attributes whose entries are listed */
    PyObject *noted;  /* those that count only if they are not empty */
    PyObject *absent; /* those that an object does not have of its own */
    PyObject *kinds;  /* set of classes */
    PyObject *trace;
    PyObject *lists; /* of each attribute of `held`, the values */
} what;

/* Attributes that are there although they usually are empty, or absent. */
static int append_unusual(PyObject *inside, const what *asked)
{
    for (Py_ssize_t at = 0, count = PyTuple_Size(asked->noted); at < count; at++) {
        PyObject *name = PyTuple_GetItem(asked->noted, at), *value = PyDict_GetItemWithError(inside, name);
        if (!value)
            return PyErr_Occurred() ? -1 : 0;
        if (!PyDict_Check(value) && !PyAnySet_Check(value)) /* others may run code of their own */
            return 0;
        if (!(PyDict_Check(value) ? PyDict_Size(value) : PySet_Size(value)))
            continue;
        Py_INCREF(value); /* what is made may have garbage collected */
        PyObject *found = PyFrozenSet_New(value); /* of keys, where it is a dict */
        Py_DECREF(value);
        int result = found ? (PyList_Append(asked->trace, name) < 0 ? -1 : PyList_Append(asked->trace, found)) : -1;
        Py_XDECREF(found);
        if (result < 0)
            return -1;
    }
    for (Py_ssize_t at = 0, count = PyTuple_Size(asked->absent); at < count; at++) {
        PyObject *name = PyTuple_GetItem(asked->absent, at);
        if (PyDict_GetItemWithError(inside, name)) {
            if (PyList_Append(asked->trace, name) < 0)
                return -1;
        } else if (PyErr_Occurred()) {
            return -1;
        }
    }
    return 1;
}

/* Lets the processor fetch together what is looked at one after the other. */
static void fetch_values(PyObject *inside, PyObject *names)
{
    for (Py_ssize_t at = 0, count = PyTuple_Size(names); at < count; at++)
        __builtin_prefetch(PyDict_GetItem(inside, PyTuple_GetItem(names, at)), 1);
}

/* One object; its inner ones go to `below`. 0: it is of another kind. */
static int look_at(PyObject *object, const what *asked, PyObject *below)
{
    PyObject *kind = (PyObject *)Py_TYPE(object), *inside = PyObject_GenericGetDict(object, NULL);
    if (!inside)
        return PyErr_ExceptionMatches(PyExc_AttributeError) ? (PyErr_Clear(), 0) : -1;
    fetch_values(inside, asked->held);
    fetch_values(inside, asked->noted);
    int result = PyList_Append(asked->trace, kind) < 0 || PySet_Add(asked->kinds, kind) < 0 ? -1 : 1;
    PyObject *dict = result > 0 ? PyDict_GetItemWithError(inside, asked->inner) : NULL;
    if (result > 0)
        result = dict ? append_entries(dict, asked->trace, below) : PyErr_Occurred() ? -1 : 0;
    for (Py_ssize_t at = 0, count = PyTuple_Size(asked->held); result > 0 && at < count; at++) {
        dict = PyDict_GetItemWithError(inside, PyTuple_GetItem(asked->held, at));
        PyObject *values = PyList_GetItem(asked->lists, at);
        result = dict ? append_entries(dict, asked->trace, values) : PyErr_Occurred() ? -1 : 0;
    }
    if (result > 0)
        result = append_unusual(inside, asked);
    Py_DECREF(inside);
    return result;
}

/* Level by level. 0: some object is of another kind, or there are too many levels. */
static int look_at_all(PyObject *root, long levels_max, const what *asked)
{
    PyObject *level = PyList_New(0);
    int result = level && PyList_Append(level, root) == 0 ? 1 : -1;
    for (long deep = 0; result > 0 && PyList_Size(level) > 0; deep++) {
        PyObject *below = PyList_New(0);
        if (!below || deep == levels_max)
            result = below ? 0 : -1;
        for (Py_ssize_t at = 0; result > 0 && at < PyList_Size(level); at++) {
            PyObject *object = PyList_GetItem(level, at);
            if (object != Py_None)
                result = look_at(object, asked, below);
        }
        Py_DECREF(level);
        level = below;
    }
    Py_XDECREF(level);
    return result;
}

/* An object and all inside it: see _objects.pyi. */
static PyObject *look(PyObject *module, PyObject *arguments)
{
    what asked;
    PyObject *root, *out = NULL;
    long levels_max;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OlUO!O!O!:look", &root, &levels_max, &asked.inner, &PyTuple_Type, &asked.held,
                          &PyTuple_Type, &asked.noted, &PyTuple_Type, &asked.absent))
        return NULL;
    asked.kinds = PySet_New(NULL);
    asked.trace = PyList_New(0);
    asked.lists = PyList_New(0);
    int result = asked.kinds && asked.trace && asked.lists ? 1 : -1;
    for (Py_ssize_t at = 0; result > 0 && at < PyTuple_Size(asked.held); at++) {
        PyObject *list = PyList_New(0);
        if (!list || PyList_Append(asked.lists, list) < 0)
            result = -1;
        Py_XDECREF(list);
    }
    if (result > 0)
        result = look_at_all(root, levels_max, &asked);
    if (result > 0)
        out = PyTuple_Pack(3, asked.trace, asked.kinds, asked.lists);
    else if (result == 0)
        out = Py_NewRef(Py_None);
    Py_XDECREF(asked.kinds);
    Py_XDECREF(asked.trace);
    Py_XDECREF(asked.lists);
    return out;
}

/* The entries of all dicts in a dict: see _objects.pyi. */
static PyObject *entries(PyObject *module, PyObject *outer)
{
    PyObject *key, *value, *trace = PyList_New(0), *keys = PyList_New(0), *values = PyList_New(0), *out = NULL;
    Py_ssize_t at = 0;
    int result = trace && keys && values ? 1 : -1;
    (void)module;
    if (result > 0 && !PyDict_Check(outer))
        result = 0;
    while (result > 0 && PyDict_Next(outer, &at, &key, &value)) {
        result = PyDict_CheckExact(value) ? PyList_Append(keys, key) == 0 ? 1 : -1 : 0;
        if (result > 0)
            result = append_entries(value, trace, values);
    }
    if (result > 0)
        out = PyTuple_Pack(3, trace, keys, values);
    else if (result == 0)
        out = Py_NewRef(Py_None);
    Py_XDECREF(trace);
    Py_XDECREF(keys);
    Py_XDECREF(values);
    return out;
}

/* The identities of a list's objects as bytes: see _objects.pyi. */
static PyObject *identities(PyObject *module, PyObject *list)
{
    Py_ssize_t count = PyList_Check(list) ? PyList_Size(list) : -1;
    (void)module;
    if (count < 0) {
        PyErr_SetString(PyExc_TypeError, "a list is needed");
        return NULL;
    }
    PyObject *out = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(void *));
    char *words = out ? PyBytes_AsString(out) : NULL;
    for (Py_ssize_t at = 0; words && at < count; at++) {
        PyObject *object = PyList_GetItem(list, at);
        memcpy(words + at * (Py_ssize_t)sizeof object, &object, sizeof object);
    }
    return out;
}

static PyMethodDef methods[] = {
    {"look", look, METH_VARARGS, NULL},
    {"entries", entries, METH_O, NULL},
    {"identities", identities, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "stepwell.native._objects", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__objects(void)
{
    return PyModuleDef_Init(&definition);
}
