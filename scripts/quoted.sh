# For other scripts to source: a path as a value on a tool's command line, "output_dir=$(quoted "$folder")".
# Hydra would take a comma, a bracket, an = or a quote for something else. A plain path stays as it is, since a comparison
# knows its rows by their keys.
quoted() {
    local -x LC_ALL=C
    if [[ "$1" =~ ^[A-Za-z0-9_./-]*/[A-Za-z0-9_./-]*$ || "$1" =~ ^[A-Za-z_][A-Za-z0-9_.-]*$ ]] &&
        [[ ! "$1" =~ ^([Nn][Uu][Ll][Ll]|[Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee]|[Nn][Aa][Nn]|[Ii][Nn][Ff])$ ]]; then
        printf '%s\n' "$1"
    else
        # backslashes stand for themselves but before a quote
        printf "'%s'\n" "$(printf '%s' "$1" | sed -E "s/(\\\\*)'/\\1\\1\\\\'/g; s/(\\\\+)\$/\\1\\1/")"
    fi
}
