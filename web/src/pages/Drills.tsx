/** Starts drills, which are faults that a person injects, and shows the outcome of each drill. */
import { NativeSelect } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'

import { useJobAddresses } from '../api/addresses'
import { call } from '../api/client'
import { drillsQuery, fleetsQuery, jobQuery, jobsQuery, useRole } from '../api/queries'
import type { Drill } from '../contract'
import { drillable, drillStatus, drillsVerdict, type Fault } from '../model/drills'
import { sentence } from '../model/format'
import { Ago, Empty, IncidentLink, JobLink, NodeLink, Shown, Status, ToneIcon } from '../parts/Basics'
import { Card } from '../parts/Card'
import { ConfirmButton } from '../parts/ConfirmButton'
import { Page } from '../parts/PageHead'
import { Table } from '../parts/Table'
import { useAddress } from '../parts/address'
import { DRILLS } from '../words/drills'

const MOST = 200

export default function DrillsPage() {
  const drills = useQuery(drillsQuery)
  const fleets = useQuery(fleetsQuery)
  const allowed = (fleets.data ?? []).filter((fleet) => fleet.AllowDrills).map((fleet) => fleet.FleetName)
  const verdict = drills.data && fleets.data ? drillsVerdict(drills.data, allowed) : undefined
  const words = DRILLS.history
  return (
    <Page title={DRILLS.title} verdict={verdict}>
      <Shown query={fleets} rows={2}>
        {(all) => <Start allowed={allowed} firstFleet={all[0]?.FleetName ?? 'main'} />}
      </Shown>
      <Card title={words.title} isFlush>
        <Shown query={drills} empty={<p className="dim empty">{words.none}</p>}>
          {(list) => <History drills={list} />}
        </Shown>
      </Card>
    </Page>
  )
}

function Start({ allowed, firstFleet }: { allowed: string[]; firstFleet: string }) {
  const { isAdmin } = useRole()
  if (!isAdmin) return <p className="dim">{DRILLS.viewer}</p>
  if (allowed.length) return <DrillForm allowed={allowed} />
  return <Empty {...DRILLS.forbidden} command={`everstep fleets update ${firstFleet} --allow-drills`} />
}

/** The form that starts a drill. The URL contains its job, fault and node, so the form keeps them after a start. */
function DrillForm({ allowed }: { allowed: string[] }) {
  const [search, set] = useAddress()
  const [started, setStarted] = useState('')
  const addressOf = useJobAddresses()
  const all = useQuery(jobsQuery).data ?? []
  const able = drillable(all, allowed)
  const chosen = all.find((job) => job.RunId === search.get('job')) ?? able[0]
  const address = chosen && addressOf(chosen)
  const job = useQuery({ ...jobQuery(address ?? ''), enabled: address !== undefined }).data
  const words = DRILLS.form
  if (chosen === undefined || address === undefined) {
    return <Empty title={DRILLS.noJob.title} text={DRILLS.noJob.text(allowed)} command="everstep jobs list" />
  }
  const isAble = able.includes(chosen)
  const choices = isAble ? able : [chosen, ...able]
  const faults = Object.entries(DRILLS.faults)
  const type = (faults.find(([name]) => name === search.get('fault'))?.[0] ?? 'terminate-instance') as Fault
  const fault = DRILLS.faults[type]
  const nodes = job?.NodeIds ?? []
  const node = nodes.find((id) => id === search.get('node')) ?? ''
  return (
    <Card title={words.title}>
      <div className="row fields">
        <NativeSelect
          label={words.job}
          value={chosen.RunId}
          data={choices.map((each) => ({ value: each.RunId, label: each.TrainingJobName }))}
          onChange={(event) => set({ job: event.currentTarget.value, node: '' })}
        />
        <NativeSelect
          label={words.fault}
          value={type}
          data={faults.map(([value, { label }]) => ({ value, label }))}
          onChange={(event) => set({ fault: event.currentTarget.value })}
        />
        <NativeSelect
          label={words.node}
          value={node}
          data={[{ value: '', label: words.lastNode }, ...nodes]}
          onChange={(event) => set({ node: event.currentTarget.value })}
        />
        <ConfirmButton
          text={words.start}
          name={chosen.TrainingJobName}
          verb={words.verb}
          button={{ size: 'sm', disabled: !isAble }}
          onConfirm={async () => {
            const target = node ? { NodeId: node } : {}
            await call('StartDrill', { TrainingJobName: chosen.RunId, DrillType: type, ...target })
            set({ job: chosen.RunId, fault: type })
            setStarted(chosen.TrainingJobName)
          }}
        >
          <p>
            {words.effect(fault.label, node || words.lastNode)} {fault.effect}
          </p>
          <p>{words.warning}</p>
        </ConfirmButton>
      </div>
      <p className="dim">{isAble ? fault.effect : DRILLS.noJob.text(allowed)}</p>
      {started && (
        <p className="banner tone-busy" role="status">
          <ToneIcon tone="busy" /> {words.started(started)}
        </p>
      )}
    </Card>
  )
}

function History({ drills }: { drills: Drill[] }) {
  const { title, columns, incident, rank } = DRILLS.history
  const faultOf = (drill: Drill) => {
    const label = DRILLS.faults[drill.DrillType]?.label ?? drill.DrillType
    return drill.Rank === undefined ? label : rank(label, drill.Rank)
  }
  return (
    <Table
      label={title}
      rows={drills.toReversed().slice(0, MOST)}
      keyOf={(drill) => drill.DrillId}
      columns={[
        [columns.requested, (drill) => <Ago at={drill.CreationTime} />, 'moment'],
        [columns.status, (drill) => <Status {...drillStatus(drill.DrillStatus)} />],
        [columns.job, (drill) => <JobLink name={drill.TrainingJobName} />, 'name'],
        [columns.fault, faultOf, 'nowrap'],
        [columns.node, (drill) => <NodeLink id={drill.NodeId} fleet={drill.FleetName} />, 'nowrap'],
        [columns.by, (drill) => drill.RequestedBy, 'nowrap'],
        [
          columns.outcome,
          ({ Outcome = '', IncidentId }) => (
            <>
              {sentence(Outcome)} {IncidentId && <IncidentLink id={IncidentId}>{incident}</IncidentLink>}
            </>
          ),
          'reason',
        ],
      ]}
    />
  )
}
