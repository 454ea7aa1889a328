/** The request that made a job, as YAML, command line, Python and curl; and what was changed of it since. */
import { NativeSelect, SegmentedControl } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'
import { useSearchParams } from 'react-router'

import { useJobAddress } from '../api/addresses'
import { revisionsQuery } from '../api/queries'
import type { TrainingJob, TrainingJobRevision } from '../contract'
import { plural } from '../model/format'
import { difference } from '../model/revisions'
import { asCommand, asCurl, asPython, asYaml, requestOf } from '../model/spec'
import { Ago, Command, Shown } from '../parts/Basics'

const FORMS = { YAML: asYaml, CLI: asCommand, Python: asPython, curl: asCurl }

export default function SpecTab({ job }: { job: TrainingJob }) {
  const [form, setForm] = useState<keyof typeof FORMS>('YAML')
  const revisions = useQuery(revisionsQuery(useJobAddress(job), job.Revision))
  return (
    <div className="stack">
      <section className="card stack">
        <SegmentedControl value={form} onChange={(value) => setForm(value as keyof typeof FORMS)} data={Object.keys(FORMS)} aria-label="Shown as" />
        <Command text={FORMS[form](requestOf(job))} />
        <p className="dim">
          The request that would make this job again as it is now, revision {job.Revision}, under another name: names are not used twice. Its source is stored as <code>{job.Source?.SourceId?.slice(0, 12)}…</code>.
        </p>
      </section>
      <section className="card stack">
        <h2>Revisions</h2>
        <Shown query={revisions} rows={2}>
          {(all) => (all.length > 1 ? <Revisions job={job} all={all} /> : <p className="dim">It is as it was submitted: there is one revision. <code>everstep jobs update {job.TrainingJobName}</code> makes the next.</p>)}
        </Shown>
      </section>
    </div>
  )
}

function Revisions({ job, all }: { job: TrainingJob; all: TrainingJobRevision[] }) {
  const [search, setSearch] = useSearchParams()
  const newest = all.at(-1)!.Revision
  const chosen = (key: string, otherwise: number) => all.find((each) => String(each.Revision) === search.get(key))?.Revision ?? otherwise
  const to = chosen('to', newest)
  const from = Math.min(chosen('from', to - 1), to)
  const found = difference(all, from, to)
  const set = (key: string, value: string) => {
    const next = new URLSearchParams(search)
    next.set(key, value)
    setSearch(next, { replace: true, preventScrollReset: true })
  }
  const choices = all.map((each) => ({ value: String(each.Revision), label: `Revision ${each.Revision}` }))
  const last = all.find((each) => each.Revision === to)
  return (
    <>
      <div className="row">
        <NativeSelect aria-label="From" value={from} data={choices} onChange={(event) => set('from', event.currentTarget.value)} />
        <span>→</span>
        <NativeSelect aria-label="To" value={to} data={choices} onChange={(event) => set('to', event.currentTarget.value)} />
        <span className="dim">
          {plural(found.length, 'field')} differ{found.length === 1 ? 's' : ''}; revision {to} was made <Ago at={last?.Time} />
          {job.ObservedRevision !== undefined && job.ObservedRevision < newest ? `; the launch that runs was planned from revision ${job.ObservedRevision}` : ''}.
        </span>
      </div>
      {found.length > 0 && (
        <div className="diff mono" role="region" aria-label={`From revision ${from} to ${to}`} tabIndex={0}>
          {found.map((each) => (
            <div key={each.field}>
              {each.before !== undefined && (
                <div className="gone">
                  − {each.field}: {each.before}
                </div>
              )}
              {each.after !== undefined && (
                <div className="came">
                  + {each.field}: {each.after}
                </div>
              )}
              {each.applies === 'NextGeneration' && <div className="dim">from the next launch on</div>}
            </div>
          ))}
        </div>
      )}
    </>
  )
}
