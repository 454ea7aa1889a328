/** The list of all fleets: desired and actual numbers of nodes, and whether a fleet needs attention. */
import { useQuery } from '@tanstack/react-query'

import { fleetsQuery } from '../api/queries'
import type { Fleet } from '../contract'
import { fleetFigures, hook, shown, type FleetFigures } from '../model/figures'
import { fleetsVerdict, spares } from '../model/fleets'
import { sentence } from '../model/format'
import { Empty, FleetLink, Shown, Status, useIsStale, Value } from '../parts/Basics'
import { Card } from '../parts/Card'
import { Page } from '../parts/PageHead'
import { Table } from '../parts/Table'
import { FLEETS } from '../words/fleets'

const FIRST_FLEET = 'everstep fleets create --name main --auto-scaling-group my-group'

export default function FleetsPage() {
  const query = useQuery(fleetsQuery)
  return (
    <Page title={FLEETS.title} verdict={query.data?.length ? fleetsVerdict(query.data) : undefined}>
      <Shown query={query} empty={<Empty {...FLEETS.empty} command={FIRST_FLEET} />}>
        {(fleets) => <FleetTable fleets={fleets} />}
      </Shown>
    </Page>
  )
}

function FleetTable({ fleets }: { fleets: Fleet[] }) {
  const { columns, differences, perHour, unknown } = FLEETS
  const isStale = useIsStale()
  const rows = fleets.map((fleet) => ({ fleet, figures: fleetFigures(fleet, { isStale }) }))
  const price = (figures: FleetFigures) =>
    figures.priceUsdPerHour === undefined ? unknown : perHour(shown(figures, 'priceUsdPerHour'))
  return (
    <Card isFlush>
      <Table
        label={FLEETS.title}
        rows={rows}
        keyOf={({ fleet }) => fleet.FleetName}
        columns={[
          [columns.fleet, ({ fleet }) => <FleetLink name={fleet.FleetName} />, 'name'],
          [
            columns.status,
            ({ fleet, figures }) => <Status tone={figures.statusTone} word={figures.status} title={fleet.Reason} />,
            undefined,
            ({ figures }) => hook(figures, 'status'),
          ],
          [
            columns.reason,
            ({ fleet: { Reason, Drift } }) =>
              `${sentence(Reason ?? '')}${Drift?.length ? ` ${differences(Drift.length)}` : ''}`,
            'reason',
          ],
          [
            columns.nodes,
            ({ figures }) => (
              <span>
                <Value of={figures} field="connectedNodes" /> / <Value of={figures} field="nodes" /> /{' '}
                <Value of={figures} field="desiredNodes" />
              </span>
            ),
            'n',
          ],
          [columns.spares, ({ fleet }) => spares(fleet), 'n'],
          [columns.type, ({ fleet }) => fleet.InstanceType || '–', 'nowrap'],
          [columns.zone, ({ fleet }) => fleet.AvailabilityZone || '–', 'nowrap'],
          [columns.price, ({ figures }) => price(figures), 'n', ({ figures }) => hook(figures, 'priceUsdPerHour')],
        ]}
      />
    </Card>
  )
}
